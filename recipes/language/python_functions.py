"""Writes instructions from Python's own standard library: signature and docstring -> function, one JSON line each.

    python recipes/language/python_functions.py data/functions.jsonl

Every machine with Python has this data, without a download. It is source code of Python itself, under the PSF License
(https://docs.python.org/3/license.html), and depends on the version of Python. Each line names its module, so that
`baton data tokenize --val-share 0.125 --by module` puts no module into both sets.
"""

import argparse
import ast
import json
import pathlib
import sysconfig

# Tests, tools and packages of others.
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo"}
SHORTEST, LONGEST = 30, 149
"""Fewest, and by default most, characters of a function's body."""
DOCSTRING = 300
"""Most characters of a docstring that an instruction shows."""


def functions(source, longest):
    """Instruction and answer for every function in a module that has a docstring and a body of a suitable length."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef) or len(node.body) < 2:
            continue
        if not (docstring := ast.get_docstring(node)):
            continue
        signature = f"def {node.name}({ast.unparse(node.args)}):"
        lines = "\n".join(ast.unparse(statement) for statement in node.body[1:]).split("\n")
        body = "\n".join("    " + line for line in lines)
        if SHORTEST <= len(body) <= longest:
            summary = docstring.split("\n\n")[0][:DOCSTRING]
            question = f'Write a Python function.\n{signature}\n    """{summary}"""'
            yield question, f"{signature}\n{body}"


def samples(library, longest):
    for path in sorted(library.rglob("*.py")):
        module = path.relative_to(library)
        if LEFT_OUT & set(module.parts):
            continue
        try:
            pairs = list(functions(path.read_text(), longest))
        except (SyntaxError, UnicodeDecodeError, ValueError):
            continue
        for question, answer in pairs:
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            yield {"module": str(module), "messages": messages}


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=pathlib.Path, help="the file of JSON lines to write")
    longest = "most characters of a function's body (default: %(default)s)"
    parser.add_argument("--longest", type=int, default=LONGEST, metavar="N", help=longest)
    arguments = parser.parse_args()
    out = arguments.out
    out.parent.mkdir(parents=True, exist_ok=True)
    count = 0
    with out.open("w") as file:
        for sample in samples(pathlib.Path(sysconfig.get_paths()["stdlib"]), arguments.longest):
            file.write(json.dumps(sample) + "\n")
            count += 1
    print(f"wrote {count} functions to {out}")


if __name__ == "__main__":
    main()
