"""What is asked for on the command line: each command with its help and its call.

What takes long to import is imported by the command that needs it.
"""
