"""How a fresh bash becomes a session again: the script that it sources, and what it does with the next command (pure).

The rule is *values first, attributes after*. `declare -i month="08"` fails, though the session has that variable: the
value was there before the attribute. Each function has a statement of its own, so that one which bash cannot read again
does not take the rest along.
"""

import re

from sandboxes.guest.bash.session import (
    BEGIN_DUMP,
    DECLARE,
    FORGOTTEN,
    FUNCTIONS,
    KEPT,
    NEEDED,
    NOWHERE,
    RESTORE_FD,
    split_unquoted,
    wary_run,
)
from sandboxes.shell_text import BECOME_AGENT, ShellSession, quote

_DEFAULT_OPTIONS = frozenset({"braceexpand", "hashall", "interactive-comments"})
_DEFAULT_SHOPTS = (
    "dotglob", "extglob", "checkwinsize", "cmdhist", "complete_fullquote", "expand_aliases", "extquote",
    "force_fignore", "globasciiranges", "globskipdots", "hostcomplete", "interactive_comments", "patsub_replacement",
    "progcomp", "promptvars", "sourcepath",
)  # fmt: skip
_BORN_WITH = (
    "HOSTNAME", "HOSTTYPE", "IFS", "MACHTYPE", "OLDPWD", "OPTERR", "OPTIND", "OSTYPE", "PATH", "PS4", "PWD", "SHELL",
    "SHLVL", "TERM",
)  # fmt: skip
NO_LOOKUP = {"SHELL": ""}
"""The environment of a bash that becomes a session, which has variables of its own. A bash without SHELL asks for the
user's entry in /etc/passwd: 20 system calls, 0.07 ms, for a value that the session's own one replaces."""
_POSIX_SHOPTS = frozenset({"expand_aliases", "inherit_errexit", "shift_verbose"})
"""Options that bash's POSIX mode sets when it begins."""
_SHOWING, _FIRING = ("verbose", "xtrace"), (" DEBUG", " ERR")
_BELOW = "__session_below"
"""The variable that says to `RUN` that a line of ours is above the command."""
_MAX_EARLY = 1 << 15
"""The most characters of orders on the line that lets the shell go on: a pipe has to hold them."""
_LATER = ("traps", "options", "shopts", "builtin", "disabled", KEPT)
"""What a restored shell takes on together with its command; see `orders`."""
_TRIED = ("functions", "function_marks", "aliases")
"""The parts of a session that are tried out with a fresh shell when they have changed."""
_READY = f"\\builtin :; {BEGIN_DUMP}"
_LATE = ("LANG", "LANGUAGE", "LC_", "HISTFILE")
"""Beginnings of the names of variables that are set last. A locale changes how bash reads the rest of the script.
HISTFILESIZE, set after HISTFILE, would cut that file."""
_NOWHERE = (
    rf"{{ \builtin kill -STOP $BASHPID & exec 5</proc/$!; \builtin cd -L {NOWHERE}; exec 5<&-; "
    r"\builtin kill -KILL $!; \builtin wait; }"
)
"""Enters the directory of a process that ends then: one in which nothing is found and nothing can be made or removed. A
session whose directory was removed comes here if its shell ended. Plain bash would stand in the removed directory."""
_ENABLE = re.compile(rb"\benable\b")
_HOOKED = {"posix": "POSIXLY_CORRECT", "ignoreeof": "IGNOREEOF"}
"""Options that bash sets and clears together with a variable. Setting the option would change the variable's value."""


def restore_script(session: ShellSession | None, workdir: str, pristine: ShellSession | None = None) -> bytes:
    """Return what a fresh bash sources to become a session; None is a new one. A bash that cannot do so exits."""
    lines = [BECOME_AGENT]
    if session is None:
        # An image's user may not enter the directory; then the root state has another. A later session never gets
        # another one, because its commands would work on files that they do not mean.
        folder, otherwise = workdir, "\\builtin cd /"
        if pristine is not None:
            reason = quote(f"the directory {workdir} is gone")
            folder, otherwise = pristine["cwd"], f"{{ \\builtin printf '%s\\n' {reason}; \\builtin exit 1; }}"
        lines += ["shopt -s expand_aliases", f"\\builtin cd -- {quote(folder)} || {otherwise}", "unset -v OLDPWD"]
        return "\n".join([*lines, _READY, ""]).encode("latin-1")
    otherwise = _NOWHERE if KEPT in session else "\\builtin exit"
    lines.append(f"\\builtin cd -- {quote(session['cwd'])} || {otherwise}")
    if session.get(KEPT) == FORGOTTEN:
        # Where this fails, bash forgets the name.
        lines.append("\\builtin pwd -P")
    # From the bottom of the stack to its top; `-n` changes no directory meanwhile.
    lines += [f"\\builtin pushd -n -- {quote(folder)}" for folder in reversed(session["dirs"])]
    if session["arguments"]:
        lines.append("\\builtin set -- " + " ".join(quote(argument) for argument in session["arguments"]))
    lines.append(f"\\builtin umask {session['umask']}")
    # pushd and cd print directories.
    text = "{\n" + "\n".join(lines) + "\n} >/dev/null\n"
    # Variables before functions: their statements need the word `declare`, which a function could replace.
    parts = [text, *_variables(session), *_functions(session)]
    # Options last: GLOBIGNORE and others change some of them.
    parts += [*_shopts(session, posix=False), "\\builtin shopt -u expand_aliases"]
    # Aliases while they are not expanded, so that none of them changes a line that follows.
    parts += [session["aliases"], *(f"\\builtin enable -n {name}" for name in _disabled(session, needed=False))]
    return "\n".join([*parts, _READY, ""]).encode("latin-1")


def needs_trial(before: ShellSession, now: ShellSession) -> bool:
    """Return whether something has changed of which it is not certain that bash reads again what it has printed."""
    changed = map(DECLARE.match, {*now["variables"]} - {*before["variables"]})
    return any(before.get(kind) != now.get(kind) for kind in _TRIED) or any(
        match is not None and "n" in match[1] for match in changed
    )


def came_back(session: ShellSession, restored: ShellSession) -> bool:
    """Return whether a fresh shell's first dump shows the session that it was started from."""
    return all(session.get(kind) == restored.get(kind) for kind in _TRIED) and (
        {line for line in session["variables"] if _variable_of(line) not in _HOOKED.values()}
        == {line for line in restored["variables"] if _variable_of(line) not in _HOOKED.values()}
    )


def _disabled(session: ShellSession, *, needed: bool) -> list[str]:
    """Return the disabled builtins that our own lines need, or those that they do not need."""
    names = [line.removeprefix("enable -n ") for line in session["disabled"].splitlines()]
    return [quote(name) for name in names if (name in NEEDED) == needed]


def _variable_of(line: str) -> str:
    match = DECLARE.match(line)
    return match[2] if match else ""


def _functions(session: ShellSession) -> list[str]:
    """Return the statement that sets `FUNCTIONS` to one line that defines the functions."""
    # Each of them then begins in line 1, as if it had been the whole command. Its patterns may need `extglob`.
    if not session["functions"]:
        return []
    # `function` makes a name of any word: `a=b ()` would be an assignment. Bash prints the brace on a line of its own.
    texts = [_HEAD.sub(r"function \1\2", text, count=1) for text in split_functions(session["functions"])]
    statements = [
        f"unset -v {FUNCTIONS}", "shopt -s extglob", *(f"eval {_on_one_line(quote(text))}" for text in texts),
        *session["function_marks"], *(["shopt -u extglob"] if "extglob" not in session["shopts"] else []),
    ]  # fmt: skip
    line = "; ".join(f"\\builtin {statement}" for statement in statements)
    return [f"{FUNCTIONS}={quote(f'{{ {line}; }} 2>/dev/null')}"]


_HEAD = re.compile(r"^(?:function )?(\S+ \(\) )\n(\{ |\( )", re.MULTILINE)


def split_functions(text: str) -> list[str]:
    """Return the functions in the output of `declare -f`, each without the word `function`."""
    starts = [(match.start(), match.start(1)) for match in _HEAD.finditer(text)]
    # A function ends with a brace at the beginning of a line. A line inside of a document may look like a head, but
    # what comes before it is no whole function then, unless the document looks like one too.
    whole = [pair for pair in starts if pair[0] == 0 or text.endswith("\n}\n", 0, pair[0])]
    ends = [*(start for start, _ in whole[1:]), len(text)]
    return [text[begin:end] for (_, begin), end in zip(whole, ends, strict=False)]


def _variables(session: ShellSession) -> list[str]:
    declared = {match[2]: match for line in session["variables"] if (match := DECLARE.match(line))}
    # A fresh bash has these.
    # A variable that is declared without a value must lose the value that bash gives it.
    unset = [name for name in _BORN_WITH if name not in declared or "=" not in declared[name].string]
    lines = [f"\\builtin unset -v {name}" for name in [*unset, *session.get("unset", ())]]
    if "name" in session:
        lines.append(f"BASH_ARGV0={quote(session['name'])}")
    # These are exported from birth, SHELL because of `NO_LOOKUP`.
    lines += [f"\\builtin declare +x {name}" for name in ("PWD", "OLDPWD", "SHLVL", "SHELL") if name in declared]
    attributes = []
    for name in sorted(declared, key=lambda name: (name.startswith(_LATE), name)):
        flags, rest = declared[name][1].lstrip("-"), declared[name].string[declared[name].end() :]
        if name in _HOOKED.values():
            if name == "IGNOREEOF":
                lines.append(declared[name].string)
            continue
        # Arrays need their kind with the value. All other attributes could refuse the value (see the module).
        kind = "".join(flag for flag in flags if flag in "aA")
        if rest or kind:
            # Only after the word itself, bash reads the value of an array.
            lines.append(f"declare -{kind or '-'} {name}{rest}")
        if (more := flags.replace(kind, "")) or not (rest or kind):
            attributes.append(f"declare -{more or '-'} {name}")
    return lines + attributes


def _shopts(session: ShellSession, *, posix: bool) -> list[str]:
    # BASH_COMPAT sets the options `compat…` itself when it is assigned.
    fixed = any(_variable_of(line) == "BASH_COMPAT" for line in session["variables"])
    own = _POSIX_SHOPTS if "posix" in session["options"] else frozenset[str]()
    wanted = [name for name in session["shopts"] if name not in own and not (fixed and name.startswith("compat"))]
    unwanted = [name for name in sorted({*_DEFAULT_SHOPTS, *(own if posix else ())}) if name not in session["shopts"]]
    return [f"\\builtin shopt -{flag} {' '.join(names)}" for flag, names in (("s", wanted), ("u", unwanted)) if names]


def orders(session: ShellSession | None, command: bytes) -> tuple[bytes, bytes]:
    """Return the line that lets the shell go on, and the text that it evaluates then: the agent's command.

    Options and traps of the session are on the line. Only what would act on our own lines too (xtrace, verbose, DEBUG
    and ERR traps) is in the text, as a line above the command: what bash cannot parse there would not take effect.
    """
    function = b"builtin" in command or (session is not None and "builtin" in session)
    needed = [] if session is None else _disabled(session, needed=True)
    disabled = _ENABLE.search(command) is not None or bool(needed)
    wary = [wary_run(function=function, disabled=disabled)] if function or disabled else []
    if session is None:
        return f"{''.join(wary)}\n".encode(), command
    # 1. On the line: options and traps that leave our own lines alone.
    options = set(session["options"])
    early = [f"\\builtin set +o {name}" for name in sorted(_DEFAULT_OPTIONS - options)]
    if "posix" in options:
        # The mode changes some options of the other kind when it begins.
        early += [*_hooked(session, "posix"), *_shopts(session, posix=True)]
    if "expand_aliases" not in session["shopts"]:
        early.append("\\builtin shopt -u expand_aliases")
    extra = sorted(options - _DEFAULT_OPTIONS - _HOOKED.keys(), key=lambda name: (name == "errexit", name))
    early += [f"\\builtin set -o {name}" for name in extra if name not in {*_SHOWING, "restricted"}]
    traps = [f"\\builtin {_on_one_line(trap)}" for trap in split_unquoted(session["traps"])]
    early += [trap for trap in traps if not trap.endswith(_FIRING)]
    early += ["\\builtin set -r"] if "restricted" in options else []
    # 2. Above the command: what would act on our own lines too.
    late = [f"\\builtin set -o {name}" for name in extra if name in _SHOWING]
    late += [trap for trap in traps if trap.endswith(_FIRING)]
    if "builtin" in session:
        late.append(f"\\builtin eval {_on_one_line(quote(session['builtin']))}")
    if needed:
        # Last, because the lines before need them.
        late.append(f"\\builtin enable -n {' '.join(needed)}")
    # Too long for the pipe.
    if sum(map(len, early)) > _MAX_EARLY:
        early, late = [], early + late
    if late and "LINENO" not in session.get("unset", ()):
        early.append(f"{_BELOW}=1")
        late.insert(0, f"\\builtin unset -v {_BELOW}")
    # `read` strips characters of the user's IFS from the end of a line; here it can strip only from a comment.
    line = "; ".join(early + wary) + " # session\n" if early or wary else "\n"
    # Bash shows no trace of commands whose errors go nowhere.
    above = f"{{ {'; '.join(late)}; }} >&{RESTORE_FD} 2>&{RESTORE_FD}\n" if late else ""
    return line.encode("latin-1"), above.encode("latin-1") + command


def taken_on_later(session: ShellSession, first: ShellSession) -> ShellSession:
    """Return a restored shell's first dump with what it takes on together with its command only; see `orders`."""
    later = {kind: session[kind] for kind in _LATER if kind in session}
    hooked = [line for line in session["variables"] if _variable_of(line) in _HOOKED.values()]
    variables = [line for line in first["variables"] if _variable_of(line) not in _HOOKED.values()]
    return {**first, **later, "variables": sorted([*variables, *hooked], key=_variable_of)}


def _hooked(session: ShellSession, option: str) -> list[str]:
    lines = [line for line in session["variables"] if (match := DECLARE.match(line)) and match[2] == _HOOKED[option]]
    return [f"\\builtin {_on_one_line(line)}" for line in lines] or [f"\\builtin set -o {option}"]


def _on_one_line(quoted: str) -> str:
    return quoted.replace("\n", "'$'\\n''")
