"""The commands: each with its help and its call of the library.

A command imports what takes long to import when it runs.
"""
