"""Files that somebody has changed, and every command over them: `tools/fuzz`.

A kind makes a sound copy, changes one file of it as its number and a seed decide, and names the
runs that read it. `judge` runs them in little memory and time, and says what is wrong with that.

    mutations    how bytes and JSON change
    cases        what a kind is, and what one case does
    judge        what one run may say, take and touch
    strangers, datasets    the kinds, by whose file is changed
    child        cases in a process of its own, for `fuzzing`, which starts such processes
"""
