"""Parts that `sweep top` and `sweep ui` share: the rows shown, and the requests of people."""
