"""What the store is told, under the lease of its sweep."""
