"""Llama for pegainfer: an example of a family in a package of its own."""
