"""What `sweep top` and `sweep ui` share: the rows that they show, and what people ask for there."""
