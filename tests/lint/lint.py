#!/usr/bin/env python3
"""The rules of the house that no compiler checks (docs/architecture.md). Usage: lint.py [ROOT]

Prints `path:line: [rule] message` for every breach and exits with 1 when there is one.
"""

import pathlib
import re
import sys

sys.dont_write_bytecode = True
from source import is_mutable_variable, mutable_statics, namespace_statements, strip  # noqa: E402

MAX_LINES = 800
CODE = {".h", ".cpp", ".cc", ".c", ".inl", ".cu", ".cuh"}
TEXT = CODE | {".py", ".cmake", ".txt", ".in", ".md", ".sh", ".yml", ".yaml", ".toml", ".html", ".js", ".css", ""}
SKIPPED_TOP = {".git", "build", ".cache"}

# What a module may see: its line in docs/architecture.md and, through those headers, what they see.
DIRECTION = {
    "core": "",
    "quant": "core",
    "io": "core",
    "text": "core",
    "format": "core quant io",
    "backend": "core quant",
    "store": "core quant io format",
    "model": "core quant io format store backend",
    "session": "core quant io format store backend model",
    "engine": "core quant io text format backend store model session",
}

SYSTEM_INCLUDE = re.compile(
    r"^(?:unistd|fcntl|dirent|poll|aio|liburing|io\.h|linux/.*|sys/.*|fstream)(?:\.h|/.*)?$")
SYSTEM_CALLS = (
    r"open|openat|creat|close|read|pread|preadv2?|readv|write|pwrite|pwritev2?|writev|mmap|munmap|madvise|lseek"
    r"|stat|fstat|lstat|statx|ftruncate|fsync|fdatasync|unlink|rename|ioctl|syscall|fallocate|posix_fadvise")
SYSTEM_USE = re.compile(
    rf"(?<![\w>:])::\s*(?:{SYSTEM_CALLS})\s*\("
    r"|(?<![\w.>:])(?:pread|pwrite|preadv2?|pwritev2?|mmap|munmap|openat|posix_fadvise|io_uring_\w+)\s*\("
    r"|(?<![\w.>])(?:std::|::)?(?:fopen|fdopen|freopen|fread|fwrite|fgets|fscanf|fseek|fclose|tmpfile)\s*\("
    r"|\bO_(?:RDONLY|WRONLY|RDWR|DIRECT|CREAT|CLOEXEC)\b"
    r"|\bstd::(?:basic_)?w?(?:ifstream|ofstream|fstream|filebuf)\b"
    r"|\b(?:fs|filesystem)::(?:exists|status|symlink_status|is_\w+|file_size|(?:recursive_)?directory_iterator"
    r"|create_\w+|remove|remove_all|rename|copy\w*|canonical|weakly_canonical|read_symlink|resize_file|space"
    r"|last_write_time|current_path|absolute|temp_directory_path)\s*[({]")
CUDA_INCLUDE = re.compile(r"^(?:cuda|cublas|cudnn|cusparse|curand|nvrtc|nvtx|nccl|cub/|thrust/|mma\.h)")
INTRINSICS_INCLUDE = re.compile(
    r"^(?:\w*mmintrin|immintrin|x86intrin|x86gprintrin|ia32intrin|intrin|avx\w*intrin|amx\w*intrin|arm_\w+)\.h$")
FAMILY = re.compile(
    r"qwen|deepseek|kimi|(?<![a-z])glm(?![a-z])|gpt[_-]?oss|minimax|mixtral|olmoe|cogito", re.I)
PRINTING = re.compile(
    r"(?<![\w.>])(?:std::|::)?(?:printf|fprintf|vprintf|vfprintf|dprintf|puts|fputs|putchar|putc|fputc|perror)\s*\("
    r"|\bstd::w?(?:cout|cerr|clog|cin)\b|\bfmt::print\w*\s*\(|\bstd::print(?:ln)?\s*\(")
ENDING = re.compile(
    r"(?<![\w.>:])(?:std::|::)?(?:abort|exit|_exit|_Exit|quick_exit)\s*\(|\bstd::terminate\b|\b__builtin_(?:trap|abort)\b")
GETENV = re.compile(r"\b(?:secure_)?getenv\b|\b(?:setenv|putenv|unsetenv)\s*\(")
# Spelled in pieces: this file is checked, too.
WORKPLACE = re.compile("|".join([r"(?<![\w.])/wo" r"rk/", "bash" "_jobs", "sub" "agent", r"\bC" r"EO\b"]))


class File:
    def __init__(self, root, path):
        self.path = path.relative_to(root).as_posix()
        self.name = path.name
        self.suffix = path.suffix
        self.text = path.read_text(encoding="utf-8", errors="replace")
        self.is_code = self.suffix in CODE
        if self.is_code:
            self.uncommented = strip(self.text, literals=False)
            self.code = strip(self.text, literals=True)

    def under(self, *folders):
        return any(self.path == f or self.path.startswith(f + "/") for f in folders)

    def includes(self):
        for match in re.finditer(r'^[ \t]*#[ \t]*include[ \t]*([<"])([^>"\n]+)[>"]', self.uncommented, re.M):
            yield match.start(1), match.group(1), match.group(2)


def line_of(text, position):
    return text.count("\n", 0, position) + 1


def search(pattern, text, message):
    for match in pattern.finditer(text):
        yield line_of(text, match.start()), message.format(match.group().strip())


def includes_matching(file, pattern, message):
    for position, _, name in file.includes():
        if pattern.match(name):
            yield line_of(file.uncommented, position), message.format(name)


# Every rule: (path of the breach, line, message) for one file.


def system_io(file):
    if file.is_code and file.under("src") and not file.under("src/io"):
        yield from includes_matching(file, SYSTEM_INCLUDE, "<{}> belongs in src/io")
        yield from search(SYSTEM_USE, file.code, "system I/O outside src/io: {}")


def cuda(file):
    if file.is_code and file.under("src", "apps", "include") and not file.under("src/backend/cuda"):
        yield from includes_matching(file, CUDA_INCLUDE, "<{}> belongs in src/backend/cuda")


def intrinsics(file):
    if file.is_code and file.under("src", "apps", "include") and not file.under("src/backend/cpu/kernels"):
        yield from includes_matching(file, INTRINSICS_INCLUDE, "<{}> belongs in src/backend/cpu/kernels")


def family(file):
    if file.under("src/model/families", "tests", "docs", "models", "tools") or file.name == "README.md":
        return
    if file.under("apps") and not file.is_code:
        return
    for number, line in enumerate((file.path + "\n" + file.text).split("\n")):
        if file.name == "CMakeLists.txt" and "families/" in line:
            continue  # the list of the files themselves
        for match in FAMILY.finditer(line):
            yield number or 1, f"family name outside src/model/families: {match.group()}"


def printing(file):
    if file.is_code and file.under("src"):
        yield from search(PRINTING, file.code, "the library does not print: {}")
        yield from includes_matching(file, re.compile("^iostream$"), "the library does not print: <{}>")


def ending(file):
    if file.is_code and file.under("src"):
        yield from search(ENDING, file.code, "the library does not end the process: {}")


def getenv(file):
    if file.is_code and file.under("src"):
        yield from search(GETENV, file.code, "options are passed, not read from the environment: {}")


def mutable_global(file):
    if not (file.is_code and file.under("src", "include")):
        return
    lines = set()
    for line, statement in namespace_statements(file.code):
        if is_mutable_variable(statement):
            lines.add(line)
    lines.update(line_of(file.code, p) for p in mutable_statics(file.code))
    lines.update(line_of(file.code, m.start()) for m in re.finditer(r"\bthread_local\b", file.code))
    for line in sorted(lines):
        yield line, "mutable global or static: " + " ".join(file.text.split("\n")[line - 1].split())


def include_form(file):
    if not (file.is_code and file.under("src", "apps", "include", "tests", "bench")):
        return
    for position, quote, name in file.includes():
        line = line_of(file.uncommented, position)
        if ".." in name.split("/"):
            yield line, f"include with ..: {name}"
        elif quote == '"' and ("/" not in name or name.startswith("/") or not name.endswith((".h", ".inl", ".cuh"))):
            yield line, f'quoted includes are "folder/file.h": {name}'


def size(file):
    if file.under("src", "apps", "include", "tests") and file.suffix in TEXT and not file.under("tests/fixtures"):
        count = file.text.count("\n")
        if count > MAX_LINES:
            yield count, f"{count} lines, at most {MAX_LINES}"


def pragma_once(file):
    if file.suffix == ".h" and file.under("src", "apps", "include", "tests", "bench"):
        if not re.search(r"^#pragma once$", file.uncommented, re.M):
            yield 1, "header without #pragma once"


def using_namespace(file):
    if file.suffix == ".h" and file.under("src", "apps", "include", "tests", "bench"):
        for line, statement in namespace_statements(file.code):
            if re.match(r"using\s+namespace\b", statement):
                yield line, "using namespace in a header"


def workplace(file):
    # Vocabularies and goldens are data: any word may occur in them.
    if file.suffix in TEXT or not file.under("models", "tests/fixtures"):
        yield from search(WORKPLACE, file.text, "the project speaks of itself alone: {}")


FILE_RULES = [
    system_io, cuda, intrinsics, family, printing, ending, getenv, mutable_global, include_form, size, pragma_once,
    using_namespace, workplace,
]


def nearest_lists(root, path):
    """The CMakeLists.txt that is responsible for a source file."""
    folder = (root / path).parent
    while folder != root:
        if (folder / "CMakeLists.txt").is_file():
            return folder / "CMakeLists.txt"
        folder = folder.parent
    return None


def listed(root, files):
    """Every source file is built. Headers are found by moeflux_module, given that there is a module."""
    for file in files:
        if not (file.under("src") and file.is_code):
            continue
        lists = nearest_lists(root, file.path)
        if lists is None or lists.parent == root / "src":
            yield file, 1, "no module builds this file: its folder has no CMakeLists.txt"
        elif file.suffix in (".cpp", ".cc", ".c", ".cu"):
            relative = (root / file.path).relative_to(lists.parent).as_posix()
            if not re.search(rf"(?<![\w/.-]){re.escape(relative)}(?![\w.-])", uncommented_cmake(lists)):
                yield file, 1, f"not listed in {lists.relative_to(root).as_posix()}"


def uncommented_cmake(path):
    return re.sub(r"#[^\n]*", "", path.read_text())


def direction(root, files):
    """Dependencies declared by moeflux_module() point only downwards."""
    modules = {}  # name -> (its CMakeLists.txt, folder below src, dependencies)
    for file in files:
        if file.under("src") and file.name == "CMakeLists.txt":
            for match in re.finditer(r"\bmoeflux_module\s*\(([^)]*)\)", re.sub(r"#[^\n]*", "", file.text)):
                words = match.group(1).split()
                modules[words[0]] = (file, file.path.split("/")[1:-1] or [words[0]], list(dependencies(words)))
    for name, (file, folder, deps) in modules.items():
        top = folder[0]
        if top not in DIRECTION:
            yield file, 1, f"unknown folder {top}: add its line to docs/architecture.md and to lint.py"
            continue
        for dep in deps:
            dep_folder = modules[dep][1] if dep in modules else [dep]
            # Parts such as backend/cpu are known to their own folder and to engine, which chooses among them.
            a_part = len(dep_folder) > 1 and top not in ("engine", dep_folder[0])
            if dep_folder[0] not in DIRECTION[top].split() + [top] * (len(folder) > 1) or a_part:
                yield file, 1, f"module {name} of src/{top} may not depend on {dep}"


def dependencies(words):
    active = False
    for word in words:
        if word in ("SOURCES", "DEPS", "LIBS", "FOLDER"):
            active = word == "DEPS"
        elif active:
            yield word


TREE_RULES = [listed, direction]


def tracked(root):
    for path in sorted(root.rglob("*")):
        parts = path.relative_to(root).parts
        if parts[0] in SKIPPED_TOP or "__pycache__" in parts or path.name.endswith(".swp"):
            continue
        if path.is_file() and (path.suffix in TEXT or path.suffix in (".json", ".jinja")):
            yield path


def lint(root):
    """All breaches below root, as printable lines."""
    root = pathlib.Path(root).resolve()
    files = [File(root, path) for path in tracked(root)]
    found = []
    for file in files:
        for rule in FILE_RULES:
            found += [(file.path, line, rule.__name__, message) for line, message in rule(file)]
    for rule in TREE_RULES:
        found += [(file.path, line, rule.__name__, message) for file, line, message in rule(root, files)]
    return [f"{path}:{line}: [{rule}] {message}" for path, line, rule, message in sorted(found)], len(files)


def main():
    root = sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parents[2]
    breaches, n_files = lint(root)
    for breach in breaches:
        print(breach)
    print(f"{n_files} files, {len(breaches)} breaches")
    if n_files == 0:
        sys.exit("nothing was checked")
    sys.exit(1 if breaches else 0)


if __name__ == "__main__":
    main()
