"""Who does units of work: processes on this machine, or Ray actors.

1. A *unit* is small, has a name and can be done twice without harm. *Work* is what prepares
   a worker for it.
2. A driver keeps each worker supplied: with its next unit when it is idle, or with up to
   `units_per_worker` at once. It reads units as lazily as that needs.
3. A unit that raised, or killed its worker, is tried again; after `max_attempts` it is
   quarantined and the rest is finished. A worker lost to a removed node costs no attempt.
4. Where a worker dies with several units, each of them runs *alone* from then on,
   so that the one which kills is told from its neighbours, and only that is quarantined. A place
   where all fail or die is given up, and their last attempt is made elsewhere.
5. A worker whose units, or whose opening, come no further for long (`stuck_workers`) is
   ended, and judged as if it had died.
6. A worker that cannot open costs the run one place, which is given up after `max_attempts`, unless
   what is wrong is the request, or no worker was ever ready: that ends the run.
7. A unit may say more by what it raises: `HopelessError`, that it need not be tried again;
   `BrokenWorkerError`, that its worker is as good as dead; a `WdsprepError`, that the whole
   run cannot go on: everything stops, and the driver raises it.
8. A worker that finds another version of wdsprep than its driver's unpickles nothing: the run ends,
   and says what is where (`worker_versions`).

`job` says how far a command is and who hears of it; `run` makes a dataset of the events of a
runner. `schedule` decides who gets which unit, and what a failure costs; `local`
and `ray` carry its messages to workers and back, `stuck_workers` ends what hangs, and says what
lacked memory. `worker` is the side of a worker, with the whole life of a local one. `make_runner`
makes a runner of its `RunnerSettings`, or one that does without workers, and judges failures alike;
its `Job` is the units of a command and their results.
`base` has what all of these tell each other, `options` the options that several commands have,
`progress` their progress line. `track` tells Weights & Biases or TensorBoard how far a run is.

    job = Job(options, check_unit, units, name="verify")
    with contextlib.closing(job):  # which ends the workers, also after an exception
        for unit, result in job.results(): ...
    job.quarantined  # what failed for good

In: Work, and the units to do it on.
Out: Events: progress, results, what was set aside. Of a whole run, the published manifest.
"""
