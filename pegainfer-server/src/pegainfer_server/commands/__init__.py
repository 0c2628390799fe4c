"""Subcommands of `pegainfer`, one module each. A module imports what its work needs when the command runs."""
