"""The command `doctor`: the checks of a machine, a store, a cluster and a program."""
