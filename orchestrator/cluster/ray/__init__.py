"""Places on Ray: everything that imports ray."""
