#!/usr/bin/env python3
"""Every lint rule fires on a bad sample and is silent on a good one."""

import pathlib
import sys
import tempfile
import unittest

sys.dont_write_bytecode = True
import lint  # noqa: E402

HEADER = "#pragma once\n"
LISTS = {"src/core/CMakeLists.txt": "moeflux_module(core SOURCES a.cpp b.cpp)\n"}
WORK = "/wo" + "rk/"


def breaches(files):
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        for name, text in files.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return lint.lint(root)[0]


def in_core(text):
    return {**LISTS, "src/core/a.cpp": text, "src/core/b.cpp": "int f() { return 1; }\n"}


# rule -> samples that break it; a string is the content of src/core/a.cpp.
BAD = {
    "system_io": [
        "#include <unistd.h>\n",
        "#include <sys/mman.h>\n",
        "#include <liburing.h>\n",
        "#include <fstream>\n",
        "int f() { return ::open(p, 0); }\n",
        "int f() { return open(p, O_RDONLY); }\n",
        "auto n = [] { return pread(fd, b, n, 0); }();\n",
        "void f() { std::ifstream in(path); }\n",
        "void f() { auto* h = std::fopen(p, m); }\n",
        "bool f() { return std::filesystem::exists(p); }\n",
        "void f() { void* p = mmap(nullptr, n, 1, 2, fd, 0); }\n",
    ],
    "cuda": [
        "#include <cuda_runtime.h>\n",
        "#include <cublas_v2.h>\n",
        {"apps/cli/a.cpp": "#include <cuda.h>\n"},
        {"include/moeflux/a.h": HEADER + '#include "cuda_fp16.h"\n'},
    ],
    "intrinsics": ["#include <immintrin.h>\n", "#include <arm_neon.h>\n", "#  include <x86intrin.h>\n"],
    "family": [
        "// as Qwen does\n",
        'auto s = "deepseek_v3";\n',
        "struct GptOss {};\n",
        "int glm4 = 1;\n",
        {"apps/cli/a.cpp": 'auto s = "mixtral";\n'},
        {"src/core/kimi.h": HEADER, **LISTS},
        {"bench/a.cpp": "// olmoe\n"},
    ],
    "printing": [
        'void f() { printf("x"); }\n',
        'void f() { std::fprintf(stderr, "x"); }\n',
        "void f() { std::cerr << 1; }\n",
        'void f() { fmt::print("x"); }\n',
        "#include <iostream>\n",
    ],
    "ending": [
        "void f() { abort(); }\n",
        "void f() { std::exit(1); }\n",
        "void f() { ::_exit(1); }\n",
        "void f() { std::terminate(); }\n",
    ],
    "getenv": ['auto p = std::getenv("HOME");\n', 'auto p = ::secure_getenv("HOME");\n'],
    "mutable_global": [
        "int counter = 0;\n",
        "namespace moeflux {\nstd::vector<int> cache;\n}\n",
        "namespace {\nstd::atomic<int> n{0};\n}\n",
        "static bool ready;\n",
        "inline std::mutex lock;\n",
        "const char* name = nullptr;\n",
        "const char* kNames[] = {0};\n",
        "constinit int x = 3;\n",
        "void f() { static int calls = 0; }\n",
        "void f() { static std::map<std::string, const char*> m; }\n",
        "struct A { static int n; };\n",
        "thread_local int t = 0;\n",
        "void f() { thread_local int t = 0; }\n",
        "struct S { int a; } shared;\n",
        "std::function<int(int)> hook;\n",
        'extern "C" {\nint n;\n}\n',
    ],
    "include_form": [
        '#include "../core/error.h"\n',
        "#include <../x.h>\n",
        '#include "error.h"\n',
        '#include "core/error.cpp"\n',
        {"tests/core/a.cpp": '#include "helper.h"\n'},
    ],
    "size": [{"tests/core/a.cpp": "//\n" * 801}, {"apps/cli/CMakeLists.txt": "#\n" * 801}],
    "pragma_once": [{"include/moeflux/a.h": "// #pragma once\n"}, {"src/core/a.h": "", **LISTS}],
    "using_namespace": [{"src/core/a.h": HEADER + "namespace moeflux {\nusing namespace std;\n}\n", **LISTS}],
    "workplace": [
        {"README.md": f"see {WORK}main\n"},
        {"dev": "cd " + WORK + "x\n"},
        {"docs/a.md": "a sub" + "agent\n"},
        {"docs/a.md": "the C" + "EO said\n"},
    ],
    "listed": [
        {**LISTS, "src/core/c.cpp": ""},
        {**LISTS, "src/core/sub/a.cpp": ""},
        {**LISTS, "src/core/c.cpp": "", "src/core/CMakeLists.txt": "moeflux_module(core SOURCES a.cpp) # c.cpp\n"},
        {"src/CMakeLists.txt": "", "src/other/a.h": HEADER},
    ],
    "direction": [
        {"src/core/CMakeLists.txt": "moeflux_module(core SOURCES a.cpp DEPS quant)\n"},
        {"src/store/CMakeLists.txt": "moeflux_module(store\n  SOURCES a.cpp\n  DEPS core backend LIBS x)\n"},
        {"src/attic/CMakeLists.txt": "moeflux_module(attic SOURCES a.cpp)\n"},
        {
            "src/backend/cpu/CMakeLists.txt": "moeflux_module(cpu FOLDER backend/cpu SOURCES a.cpp DEPS core backend)\n",
            "src/model/CMakeLists.txt": "moeflux_module(model SOURCES a.cpp DEPS core cpu)\n",
        },
    ],
}

GOOD = {
    "system_io": [
        {"src/io/CMakeLists.txt": "moeflux_module(io SOURCES a.cpp)\n",
         "src/io/a.cpp": "#include <fcntl.h>\nint f() { return ::open(p, O_RDONLY); }\n"},
        "// ::open(p) and mmap(x)\n",
        "void f() { file.read(b); auto g = File::open(p); reader->pread(1); }\n",
        'const auto s = "::read(";\n',
        "#include <filesystem>\nstd::filesystem::path p();\n",
        {"apps/cli/a.cpp": "#include <fstream>\n"},
    ],
    "cuda": [{"src/backend/cuda/CMakeLists.txt": "moeflux_module(cuda SOURCES a.cu)\n",
              "src/backend/cuda/a.cu": "#include <cuda_runtime.h>\n"},
             '#include "backend/cuda/x.h"\n'],
    "intrinsics": [{"src/backend/cpu/CMakeLists.txt": "moeflux_module(cpu SOURCES kernels/a.cpp)\n",
                    "src/backend/cpu/kernels/a.cpp": "#include <immintrin.h>\n"}],
    "family": [
        {"src/model/CMakeLists.txt": "moeflux_module(model SOURCES families/qwen3.cpp)\n",
         "src/model/families/qwen3.cpp": 'const auto s = "qwen3";\n'},
        {"README.md": "Runs Qwen.\n"},
        {"docs/a.md": "Kimi\n", "apps/cli/shapes.json": '["deepseek"]\n'},
        "int mangled_glmatrix = 0;\n".replace("int", "const int"),
    ],
    "printing": ['void f() { std::snprintf(b, n, "x"); log.puts(1); }\n', "// std::cout\n",
                 {"apps/cli/a.cpp": "void f() { std::cout << 1; }\n"}],
    "ending": ["void f() { loop.exit(1); scope->abort(); on_exit(2); }\n", "void Loop::exit(int) {}\n",
               {"apps/cli/a.cpp": "void f() { std::exit(1); }\n"}],
    "getenv": [{"apps/cli/a.cpp": 'auto p = getenv("X");\n'}, '// getenv\nconst auto s = "getenv";\n'],
    "mutable_global": [
        "constexpr int kA = 1;\nconst int kB = 1;\ninline constexpr double kC = 2;\n",
        "constexpr const char* kUnits[] = {0};\nconst char* const kName = nullptr;\n",
        "constexpr std::array kTable{\n  Entry{1, 2}, Entry{3, 4},\n};\n",
        "const std::map<int, const char*> kMap = {{1, nullptr}};\n",
        "namespace moeflux {\nnamespace {\nstruct A {\n  int n = 0;\n  static A make(int n);\n};\n}  // namespace\n}\n",
        "void f() { static const std::vector<int> v = {1}; static constexpr int n = 2; int local = 3; }\n",
        "struct A;\nenum class E : std::uint8_t { X, Y };\nclass B final : public A {};\n",
        "template <class T>\nT f(T a, int n = 0);\ntemplate <> int f<int>(int);\nextern template class V<int>;\n",
        "using A = int;\ntypedef int B;\nnamespace fs = std::filesystem;\nstatic_assert(1 == 1);\n",
        "bool operator==(const A& a, const A& b);\nA& A::operator=(A&& o) noexcept { return *this; }\n",
        "A::A(int n) : n_(n), m_{n} { static_cast<void>(n); }\nA::~A() = default;\n",
        "static int helper(int n) { return n; }\nstatic std::vector<int> g(const std::map<int, int>& m);\n",
        "[[noreturn]] void fail();\nauto h() -> int { return 1; }\nstd::vector<int> list(int n) { return {n}; }\n",
        "template <std::integral T>\nconstexpr std::optional<T> add(T a, T b) noexcept { return a; }\n",
        "const auto kBig = 1'000'000;\n#define X int y = 0;\n",
        "template <class T> concept Number = std::integral<T>;\nextern const int kLater;\n",
        "inline __attribute__((always_inline)) float fma(float a) noexcept { return a; }\n",
        "struct alignas(64) A {\n  int n;\n};\n",
    ],
    "include_form": ['#include "core/error.h"\n#include <vector>\n#include "backend/cpu/kernels/generic/a.inl"\n'],
    "size": [{"tests/core/a.cpp": "//\n" * 800}, {"tests/fixtures/a.txt": "\n" * 900}],
    "pragma_once": [{"include/moeflux/a.h": "// Purpose.\n" + HEADER}],
    "using_namespace": [{"src/core/a.h": HEADER + "inline void f() { using namespace std; }\nusing std::move;\n", **LISTS}],
    "workplace": [{"README.md": "in your home/work/ folder, a PIONCEO, work\n"}],
    "listed": [{**LISTS, "src/core/a.cpp": "", "src/core/x.h": HEADER}],
    "direction": [
        {"src/format/CMakeLists.txt": "moeflux_module(format SOURCES a.cpp DEPS core quant io LIBS quux)\n"},
        {"src/backend/cpu/CMakeLists.txt": "moeflux_module(cpu FOLDER backend/cpu SOURCES a.cpp DEPS core backend)\n",
         "src/engine/CMakeLists.txt": "moeflux_module(engine SOURCES a.cpp DEPS core cpu)\n"},
    ],
}


class Rules(unittest.TestCase):
    def samples(self, table):
        for rule, samples in table.items():
            for sample in samples:
                yield rule, breaches(in_core(sample) if isinstance(sample, str) else sample), sample

    def test_every_rule_has_samples(self):
        names = {rule.__name__ for rule in lint.FILE_RULES + lint.TREE_RULES}
        self.assertEqual(names, set(BAD))
        self.assertEqual(names, set(GOOD))

    def test_bad_samples_are_found(self):
        for rule, found, sample in self.samples(BAD):
            with self.subTest(rule=rule, sample=sample):
                self.assertTrue(any(f"[{rule}]" in line for line in found), found)

    def test_good_samples_are_clean(self):
        for rule, found, sample in self.samples(GOOD):
            with self.subTest(rule=rule, sample=sample):
                self.assertEqual(found, [])

    def test_lines_are_named(self):
        found = breaches(in_core("/* a\n b */\nconst auto s = R\"(\n)\";\nvoid f() { abort(); }\n"))
        self.assertEqual([line.split(" ")[0] for line in found], ["src/core/a.cpp:5:"])


if __name__ == "__main__":
    unittest.main()
