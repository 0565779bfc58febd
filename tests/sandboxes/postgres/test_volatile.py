"""Names of what changes from run to run are found in linear time, whatever stands between a name and its arguments."""

import pytest

from sandboxes.postgres.volatile import VOLATILE


@pytest.mark.parametrize(
    "sql",
    [
        "select now()", "select now ( )", 'select "now"()', "select random/**/()", "select random /* a /* b */ c */ ()",
        "select random -- why\n()", "select random --\n/**/ --\n ()", "select RANDOM\n(\n)", "select 'now'::timestamp",
        "select current_date", "select pg_sleep(1)", "select ctid from t", "select session_user",
        "show session_authorization", "select $$now$$::date",
        "select * from pg_statio_all_tables", "select is_dst from pg_timezone_names",
        "select rolconfig from pg_roles", "show application_name", r"select E'\156ow'::timestamptz",
        r"select e'n\x6fw'::timestamptz", r"select e'\ttoday'::date", r"select E' \u0074omorrow'::date",
        "set application_name = 'a'; select set_config('a.b', current_setting('application_name'), false)",
        "create function f() returns text set application_name from current as ''",
        "select '{now}'::timestamptz[]", "select '(1, Today)'::seen", "select '[\"now\",)'::tstzrange",
        "select array_shuffle(a)", "select * from pg_show_all_settings()",
    ],
)  # fmt: skip
def test_volatile_statements_are_found(sql: str) -> None:
    assert VOLATILE.search(sql) is not None


@pytest.mark.parametrize(
    "sql",
    [
        "select 1", "select nowhere(1)", "select a.random from a", "select average(x) from t",
        "select * from user_roles", "SET application_name = 'mine'", "set\napplication_name TO 'mine'",
        "set session application_name = 'a'", "SET LOCAL application_name='a'", "reset application_name",
        r"select E'caf\u00e9'", r"insert into t values (E'\\x6e6f77')", r"select E'it\'s now'",
        "insert into t (a, today) values ('(x', 'and now')",
    ],
)  # fmt: skip
def test_steady_statements_are_not(sql: str) -> None:
    assert VOLATILE.search(sql) is None


@pytest.mark.parametrize("between", ["/**/", " /**/ ", "--\n", "/*", ' "', "/* */--\n", "e'n", r"e'\n", "'(", ", "])
def test_no_statement_makes_the_search_slow(between: str) -> None:
    """An agent's statement of 200 bytes took minutes, and each comment more doubled them."""
    VOLATILE.search("select random " + between * 50_000 + "x")
