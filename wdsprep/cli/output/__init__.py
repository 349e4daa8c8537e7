"""The output of the commands: progress, questions, results and next steps.

Each file has what the commands of a room print, and `shared` what several of them print.
"""
