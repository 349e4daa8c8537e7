"""The output of the commands: progress, questions, results and next steps.

Each file has what the command of its name prints, and `shared` has what several of them print.
"""
