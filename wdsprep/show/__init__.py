"""What the commands print: on the way, and at the end for a person or for a program."""
