"""Lets the model write functions of modules that are not trained on, and says how many of them are valid Python.

    functions.py --programs DIR --recipe FILE [--weights FILE] [--show N]

Run in .lora. Tokens are the most likely ones, at most 160 a function; a function that is cut off there counts as wrong
unless it happens to be valid.
"""

import argparse
import ast
import json
import re
import subprocess
from pathlib import Path

FUNCTIONS, MAX_TOKENS = 16, 160


def output(*command):
    return json.loads(subprocess.check_output([str(word) for word in command], text=True))


def prompts(programs):
    """Beginnings of samples: all that the loss does not count."""
    show = ["data", "inspect", "data/functions-val.beton", "--tokenizer", "models/smollm2", "--json"]
    # Far apart, to be of many modules.
    shown = output(programs / "baton", *show, "--show", 40 * FUNCTIONS)["texts"][::40]
    return ["".join(part["text"] for part in text["parts"] if not part["loss"]) for text in shown]


def code(text):
    """The program in an answer: its first block of Markdown, if there is one."""
    block = re.search(r"```(?:python)?\n(.*?)(?:```|\Z)", text, re.DOTALL)
    return block[1] if block else text


def is_valid(text):
    try:
        return bool(ast.parse(code(text)).body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--programs", type=Path, required=True)
    parser.add_argument("--recipe", type=Path, required=True)
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--show", type=int, default=0)
    arguments = parser.parse_args()
    command = [arguments.programs / "baton-worker", "generate", "--recipe", arguments.recipe, "--plain", "--json"]
    command += ["--max-tokens", MAX_TOKENS]
    command += ["--weights", arguments.weights] if arguments.weights else []
    for prompt in prompts(arguments.programs):
        command += ["--prompt", prompt]
    texts = [text["text"].strip() for text in output(*command)["texts"]]
    valid = sum(map(is_valid, texts))
    print(f"valid Python: {valid} of {len(texts)} functions, {100 * valid / len(texts):.0f} %")
    for text in texts[: arguments.show]:
        print("\n" + "".join(c if c.isprintable() or c in "\n\t" else "?" for c in text))


if __name__ == "__main__":
    main()
