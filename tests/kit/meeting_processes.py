"""Makes processes that run `wdsprep` at once: each is forked from this one, which has loaded all.

What a command does is real; its units are done in its own process, one after the other, and the
encoder is a stand-in whose latents differ from process to process, as those of two GPUs do.

A line on stdin is the JSON of a command's arguments, of the file for what it says and of what its
environment has besides: the answer is its process id. Or it is such an id: the answer is how that
process ended.
"""

import contextlib
import gc
import json
import os
import sys
from dataclasses import replace
from typing import Any, NoReturn
from unittest.mock import patch

import torch

from tests.kit.encode_work import Making, Plain
from tests.kit.encodes import Here
from wdsprep.__main__ import main
from wdsprep.encoding.models.base import Encoded
from wdsprep.encoding.models.find_model import Model
from wdsprep.encoding.recipe_options import Encode

ALIKE = "ENCODES_ALIKE"
"""What the environment of a process has whose latents are those of all others."""


class Own(Plain):
    def encode_images(self, *what: Any, **how: Any) -> Encoded:
        found = super().encode_images(*what, **how)
        latents = found.arrays["latent.npy"] + (0 if ALIKE in os.environ else os.getpid() % 64)
        return replace(found, arrays={**found.arrays, "latent.npy": latents.half()})


def make_encoder(model: Model, recipe: Encode, device: str) -> Own:
    return Own(Making(), model, recipe, torch.device(device))


def here(*_args: object, **_options: object) -> Here:
    return Here()


def run(arguments: list[str], log: str, environment: dict[str, str]) -> NoReturn:
    os.environ.update(environment)
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    torch.set_num_threads(1)
    code = 1
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(patch("wdsprep.packing.pack.make_runner", here))
            stack.enter_context(patch("wdsprep.encoding.run_plan.make_runner", here))
            stack.enter_context(patch("wdsprep.encoding.encode.make_encoder", make_encoder))
            sys.argv[:] = ["wdsprep", *arguments]
            code = main()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def serve() -> None:
    gc.freeze()  # else each process would go through, and so copy, all that is loaded here
    print("ready", flush=True)  # noqa: T201
    for line in sys.stdin:
        asked = json.loads(line)
        if isinstance(asked, int):
            answer = os.waitstatus_to_exitcode(os.waitpid(asked, 0)[1])
        elif not (answer := os.fork()):
            run(*asked)
        print(answer, flush=True)  # noqa: T201


if __name__ == "__main__":
    serve()
