"""The store, the sweep and the files that commands work on."""
