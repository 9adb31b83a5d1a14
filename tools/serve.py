# SPDX-License-Identifier: Apache-2.0
"""Serve a model to programs that train it with the Tinker API.

Of the recipe, the sections of the model, its layout and its engine are used; data, rewards and the algorithm come with
the clients' requests. Besides the recipe's settings:

    serve.port=8000        port; 0 for any free one
    serve.host=127.0.0.1   address; any but this machine's own needs serve.token_file
    serve.token_file=FILE  a key per line and its owner's name, mode 600
    serve.name=NAME        name of the model for clients (default: the last part of model.path)
    serve.train_unembed=ignore   accept the client's train_unembed=True, though the unembedding gets no adapter
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_rl.run.command_line import end_program, leave
from tools.serving.starting import serve

if __name__ == "__main__":
    if sys.argv[1:2] in ([], ["--help"], ["-h"]):
        print(f"usage: bash launch/serve.sh RECIPE.yaml [key=value ...]\n\n{__doc__}")
        sys.exit(0 if sys.argv[1:] else 2)
    try:
        serve(Path(sys.argv[1]), sys.argv[2:])
        code = 0
    except (Exception, KeyboardInterrupt) as error:
        code = end_program(error)
    leave(code)
