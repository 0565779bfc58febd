"""Random programs of session commands: sequences of calls, each of some statements."""

from hypothesis import strategies as st

_NAMES = st.sampled_from(["a", "b", "c", "PATHX", "_x1", "LANGUAGE2"])
_VALUES = st.one_of(
    st.sampled_from(["", "x y", "08", "*", "~", "a'b", 'say "hi"', "$a", "`b`", "\\", "é", "-n", "[1]", "=", "a\nb"]),
    st.binary(max_size=6).map(lambda data: data.replace(b"\0", b"0").decode("utf-8", "surrogateescape")),
)
_FOLDERS = st.sampled_from(["d", "d/e", "f", "g h", "l"])


def _quote(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


_WORDS = _VALUES.map(_quote)


def _one(text: str, *parts: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.tuples(*parts).map(lambda values: text.format(*values))


_VARIABLES = [
    _one("{}={}", _NAMES, _WORDS),
    _one("export {}={}", _NAMES, _WORDS),
    # An array's name is taken by nothing else, because bash refuses to turn one kind into the other.
    _one("arr[{}]={}", st.sampled_from(["0", "3", "77"]), _WORDS),
    _one("arr=({} {})", _WORDS, _WORDS),
    _one("map[{}]={}", st.sampled_from(["k", "'k 2'", "'$x'", "'a]b'"]), _WORDS),
    _one("declare {} {}", st.sampled_from(["-u", "-l", "-x", "+x", "-t", "-c", "+u", "+l", "-r"]), _NAMES),
    _one("declare {} {}={}", st.sampled_from(["-u", "-l", "-x", "-ux", "-lt"]), _NAMES, _WORDS),
    # An error of arithmetic ends a bash that was started with -c, so integers get no other values.
    st.sampled_from(["unset n; n=08; declare -i n", "unset n; declare -i n; n=3+4", "n=5", "declare -ix n", "unset n"]),
    _one("unset -v {}", _NAMES),
    _one("declare -n ref={}", _NAMES),
    st.sampled_from(["ref=through", "unset -n ref", "declare -n ref2=ref", "unset arr", "unset map; declare -A map"]),
    st.sampled_from(
        ["IFS=:", "IFS=", "unset IFS", "PS4='> '", "OPTIND=4", "IGNOREEOF=7", "GLOBIGNORE='*.o'", "TMOUT=9"]
    ),
    st.sampled_from(["unset PS4", "export -n PATH", "LC_ALL=C", "LC_ALL=C.UTF-8", "unset LC_ALL", "BASH_COMPAT=4.4"]),
    st.sampled_from(
        ["POSIXLY_CORRECT=1", "unset POSIXLY_CORRECT", "unset RANDOM", "HISTSIZE=5", "export PWD", "OLDPWD=x"]
    ),
]
_OPTIONS = [
    _one(
        "set {}o {}",
        st.sampled_from("-+"),
        st.sampled_from(["noglob", "noclobber", "pipefail", "allexport", "nounset"]),
    ),
    _one(
        "set {}o {}", st.sampled_from("-+"), st.sampled_from(["hashall", "braceexpand", "physical", "keyword", "posix"])
    ),
    _one(
        "set {}o {}",
        st.sampled_from("-+"),
        st.sampled_from(["errtrace", "functrace", "notify", "interactive-comments"]),
    ),
    _one(
        "shopt -{} {}", st.sampled_from("su"), st.sampled_from(["extglob", "nullglob", "dotglob", "lastpipe", "autocd"])
    ),
    _one("shopt -{} {}", st.sampled_from("su"), st.sampled_from(["expand_aliases", "nocasematch", "inherit_errexit"])),
    _one("umask {}", st.sampled_from(["022", "077", "0", "027"])),
    _one("set -- {} {}", _WORDS, _WORDS),
    st.sampled_from(["shift", "ulimit -S -n 200", "ulimit -c 0", "enable -n times", "enable times", "set +o posix"]),
]
_CODE = [
    _one("{}() {{ echo {} \"$1\"; }}", st.sampled_from(["fn", "fn-2", "cd", "umask", "shopt", "if_"]), _WORDS),
    st.sampled_from([
        "function o=p { echo op; }", "fn() { cat <<E\n$1 () \nE\n}", "fn() ( echo sub )", "export -f fn",
        "fn() { local x=1; for i in 1 2; do case $i in 1) echo one;; *) echo $((i+x));; esac; done >&2; }",
        "readonly -f fn", "declare -ft fn", "unset -f umask shopt", "fn a", "alias al='echo al'", "alias um=umask",
        "alias '{'='echo brace'", "unalias -a", "al x", "um",
    ]),
    _one("trap {} {}", st.sampled_from(["'echo t'", "''", "-", "'x=1\ny'"]), st.sampled_from(["USR1", "INT", "EXIT"])),
    st.sampled_from(["trap 'z=e' ERR", "trap - ERR", "trap : DEBUG", "trap - DEBUG", "trap : RETURN", "kill -USR1 $$"]),
]  # fmt: skip
_PLACES = [
    _one("\\command mkdir -p {}", _FOLDERS.map(_quote)),
    _one(
        "\\builtin cd {}", st.one_of(_FOLDERS.map(_quote), st.sampled_from(["..", "-", ".", "../f", '"$base"', "-P ."]))
    ),
    _one("\\command mv {} {}", _FOLDERS.map(_quote), _FOLDERS.map(_quote)),
    _one('\\command mv "$base"/{} "$base"/{}', _FOLDERS.map(_quote), _FOLDERS.map(_quote)),
    _one('\\command rm -rf "$base"/{}', _FOLDERS.map(_quote)),
    _one('\\command rm -rf "$base"/{0}; \\command mkdir "$base"/{0}', _FOLDERS.map(_quote)),
    _one('\\command ln -sfn {} "$base"/l', _FOLDERS.map(_quote)),
    _one("\\builtin pushd {} >/dev/null", _FOLDERS.map(_quote)),
    st.sampled_from(
        ["popd", "pushd +1", "dirs -c", "pwd", "touch new; echo $?", "\\command ls", "PWD=lie", "unset OLDPWD"]
    ),
]
_STATEMENTS = st.one_of(*_VARIABLES, *_OPTIONS, *_CODE, *_PLACES, *_PLACES)

calls = st.lists(st.lists(_STATEMENTS, min_size=1, max_size=4).map("\n".join), min_size=2, max_size=6)
"""Calls of one session."""

_HELD = [
    st.sampled_from(["exec 7>'a file'", "echo to-seven >&7", "exec 7>&-", "exec 5<>'a file'", "exec {free}<."]),
    st.sampled_from(["{ coproc cat; } 2>/dev/null", "{ coproc C { cat; }; } 2>/dev/null", "sleep 1000 & P=$!"]),
    st.sampled_from(["echo hi >&${COPROC[1]}", "read -t 5 -r L <&${COPROC[0]}", "kill $! && wait $!"]),
    st.sampled_from(["exec 8<&5", "exec 2>&1"]),
    st.sampled_from(["ulimit -S -n 64", "ulimit -n 128", "ulimit -f 9000", "ulimit -S -s 4096", "ulimit -H -u 900"]),
]  # fmt: skip
_SH = [
    _one("{}={}", _NAMES, _WORDS),
    _one("export {}={}", _NAMES, _WORDS),
    _one("readonly {}={}", st.sampled_from(["r1", "r2"]), _WORDS),
    _one("unset -v {}", _NAMES),
    _one("set {}{}", st.sampled_from("-+"), st.sampled_from("aefuxC")),
    _one("set -- {} {}", _WORDS, _WORDS),
    _one("alias {}={}", st.sampled_from(["al", "ll", "b.c"]), _WORDS),
    _one("trap {} {}", st.sampled_from(["'echo t'", "''", "-", "'x=1\ny'"]), st.sampled_from(["USR1", "INT", "EXIT"])),
    _one("umask {}", st.sampled_from(["022", "077", "0", "027"])),
    st.sampled_from(["unalias -a", "IFS=:", "unset IFS", "PS4='> '", "OPTIND=4", "PATH=/none", "unset PWD", "shift"]),
    st.sampled_from(["export PATH; PATH=$PATH:/x", "ulimit -S -n 64", "ulimit -n 128", "set -o noglob", "cd -"]),
    st.sampled_from(["cd() { :; }; cd d", "command() { :; }; command cd d", "exit 3", "kill -9 $$"]),
    st.just("sleep 1000 & P=$!"),
]  # fmt: skip


def held_calls(*, bash: bool) -> st.SearchStrategy[list[str]]:
    """Return calls of one session that may also hold descriptors, limits and processes; of bash or a POSIX shell."""
    statement = st.one_of(_STATEMENTS, *_HELD) if bash else st.one_of(*_SH, *_PLACES[:7], *_PLACES[:7])
    return st.lists(st.lists(statement, min_size=1, max_size=4).map("\n".join), min_size=2, max_size=6)
