"""A C++ file as the lint rules see it: text, code without comments and literals, and its namespace scope."""

import re

_TOKEN = re.compile(
    r"""
    (?P<comment> //(?:\\\n|[^\n])* | /\*.*?\*/ )
  | (?P<raw> (?:u8|[uUL])?R"(?P<delim>[^()\\\s]{0,16})\( .*? \)(?P=delim)" )
  | (?P<string> "(?:\\.|[^"\\\n])*" )
  | (?P<number> \.?\d(?:'?[\w.]|(?<=[eEpP])[+-])* )
  | (?P<word> [A-Za-z_]\w* )
  | (?P<char> '(?:\\.|[^'\\\n])+' )
    """,
    re.X | re.S,
)


def _blank(text):
    """Spaces in place of everything but the line ends, so that positions stay."""
    return re.sub(r"[^\n]", " ", text)


def strip(text, literals):
    """The text without comments and, if asked, with empty string and character literals."""

    def replace(match):
        kind = match.lastgroup if match.lastgroup != "delim" else "raw"
        token = match.group()
        if kind == "comment":
            return _blank(token)
        if literals and kind in ("raw", "string", "char"):
            quote = "'" if kind == "char" else '"'
            return quote + _blank(token[1:-1]) + quote
        return token

    return _TOKEN.sub(replace, text)


def remove_template_arguments(text):
    """`std::map<int, const char*> m` becomes `std::map m`."""
    while True:
        shorter = re.sub(r"(?<![<\s=(,])\s*<[^<>;{}]*>", "", text)
        if shorter == text:
            return text
        text = shorter


_NAMESPACE = re.compile(r'^(?:inline\s+)?namespace\b|^extern\s*"\s*"$')
_TYPE = re.compile(r"^(?:typedef\s+)?(?:enum|struct|class|union)\b")


def namespace_statements(code):
    """(line, text) of every declaration at namespace scope; bodies and initializers in braces become {}.

    `code` is stripped of comments and literals.
    """
    code = re.sub(r"^[ \t]*#(?:\\\n|[^\n])*", lambda m: _blank(m.group()), code, flags=re.M)
    statement, start, i = "", 0, 0

    def line_of(position):
        return code.count("\n", 0, position) + 1

    while i < len(code):
        c = code[i]
        text = statement.strip()
        if c == "{" and _NAMESPACE.match(text):
            statement = ""
        elif c == "{":
            end = _closing(code, i)
            statement += "{}"
            i = end
            if _is_function(text):
                yield line_of(start), statement.strip()
                statement = ""
        elif c == "}":
            statement = ""
        elif c == ";":
            if text:
                yield line_of(start), text
            statement = ""
        else:
            if not text and not c.isspace():
                start = i
            statement += c
        i += 1


def _closing(code, i):
    """Position of the brace that closes the one at i (or of the last character)."""
    depth = 0
    for j in range(i, len(code)):
        depth += {"{": 1, "}": -1}.get(code[j], 0)
        if depth == 0:
            return j
    return len(code) - 1


def without_template_head(text):
    text = re.sub(r"\[\[.*?\]\]", "", text, flags=re.S).strip()
    while True:
        match = re.match(r"template\s*<", text)
        if not match:
            return text
        depth, j = 1, match.end()
        while j < len(text) and depth:
            depth += {"<": 1, ">": -1}.get(text[j], 0)
            j += 1
        text = text[j:].strip()


def _is_function(text):
    """Whether the text before a brace is the head of a function (and the brace its body)."""
    head = remove_template_arguments(without_template_head(text))
    if _TYPE.match(head) and "(" not in re.sub(r"(?:alignas|__attribute__)\s*\(+[^)]*\)+", "", head):
        return False
    paren, equal = head.find("("), _assignment(head)
    return paren >= 0 and (equal < 0 or paren < equal)


def _assignment(text):
    """Position of the first = that initializes, or -1; operator names do not count."""
    match = re.search(r"(?<![=!<>+\-*/|&^%])=(?!=)", re.sub(r"operator\s*[^\s\w(]+", lambda m: "o" * len(m.group()), text))
    return match.start() if match else -1


def is_mutable_variable(statement):
    """Whether a declaration (no comments, no literals, bodies as {}) is of a variable that can change."""
    text = without_template_head(statement)
    if re.match(r"(?:using|typedef|friend|static_assert|concept|namespace|asm|extern\s+template|return|goto)\b", text):
        return False
    text = re.sub(r"\b(?:alignas|__attribute__|decltype)\s*\(+[^()]*\)+", " ", text)
    text = remove_template_arguments(text)
    equal = _assignment(text)
    head = text if equal < 0 else text[:equal]
    type_body = re.match(r"(?:static\s+|inline\s+|const\s+|constexpr\s+)*(?:enum|struct|class|union)\b[^{]*\{\}", head)
    if type_body:  # what follows the body of a type is the variable
        return bool(head[type_body.end():].strip()) and not re.search(r"\b(?:const|constexpr)\b", head)
    if re.match(r"(?:enum|struct|class|union)\s+(?:\w+\s*)?[\w:]+(?:\s*:\s*[\w:]+)?$", head.strip()):
        return False  # forward declaration
    head = re.sub(r"\{\}.*", "", head, flags=re.S)
    if "(" in head or re.search(r"\boperator\b", head):
        return False
    words = re.findall(r"[A-Za-z_][\w:]*", head)
    if len([w for w in words if w not in ("static", "inline", "extern", "const", "constinit")]) < 2:
        return False
    if re.search(r"\bconstexpr\b", head):
        return False
    declarator = re.split(r"[*&]", head)[-1] if re.search(r"[*&]", head) else head
    return not re.search(r"\bconst\b", declarator)


_STATIC = re.compile(r"(?<![\w.])static\s+(?:inline\s+)?[^;]*?(?=[;{(]|(?<![=!<>])=(?!=))", re.S)


def mutable_statics(code):
    """Positions of `static` variables that can change, at any scope."""
    for match in _STATIC.finditer(code):
        # Parentheses inside template arguments (std::function<int(int)>) are not those of a function.
        end = match.end()
        if end < len(code) and code[end] == "(" and match.group().count("<") == match.group().count(">"):
            continue
        if is_mutable_variable(match.group()):
            yield match.start()
