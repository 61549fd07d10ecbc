"""The statements that write, under the lease of a sweep."""
