"""The canonical form of statements: what it merges has the same answers, column names included."""

import contextlib
import sqlite3

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.dialects.sql_normalize import canonical_statement

_GAP = st.sampled_from([" ", "  ", "\n", "\t ", " /* c */ ", "/**/", " -- c\n", "\n\n"])
_VOCABULARY = """
    select distinct all a b t.a 'x_y' "a" [b] `a` 1 1.5 x'00' + - || ( ) , , , from t t where = is not null distinct
    from group by order limit union count(*) max( max as c case when then else end in values returning window over -- /*
    */ ; with insert into update set delete explain 'open
"""
_WORDS = st.sampled_from(_VOCABULARY.split())


@st.composite
def _spellings(draw: st.DrawFn) -> tuple[str, str]:
    words = draw(st.lists(_WORDS, min_size=1, max_size=14))
    start = draw(st.sampled_from(["select", "select a", "select distinct a", "with x as (select a", "values ("]))
    words = [start, *words]
    end = draw(st.sampled_from(["", "from t", ") select * from x", ") from t", "from t order by 1"]))
    words += [end]
    return tuple("".join(word + draw(_GAP) for word in words) for _ in range(2))  # type: ignore[return-value]


def _answer(sql: str) -> object:
    with contextlib.closing(sqlite3.connect(":memory:")) as database:
        database.executescript("create table t (a, b); insert into t values (1, 2), (1, 3), (2, null)")
        try:
            cursor = database.execute(sql)
            return [column[0] for column in cursor.description or ()], cursor.fetchall()
        except (sqlite3.Error, sqlite3.Warning):
            # What the error quotes depends on the spelling: `near ";"` or "incomplete input".
            return "an error"


@given(_spellings())
def test_spellings_with_one_form_have_one_result(pair: tuple[str, str]) -> None:
    one, other = pair
    if canonical_statement(one, "sqlite") == canonical_statement(other, "sqlite"):
        assert _answer(one) == _answer(other)


@given(_spellings())
def test_canonical_statement_has_the_same_result(pair: tuple[str, str]) -> None:
    for sql in pair:
        form = canonical_statement(sql, "sqlite")
        assert _answer(form) == _answer(sql)
        assert canonical_statement(form, "sqlite") == form


@pytest.mark.parametrize(
    ("sql", "form"),
    [
        ("select  a , b\n from t  ; ", "select a , b from t"),
        ("SELECT\n  a,\n  b\nFROM t -- why\nWHERE a  =  'x  y'", "SELECT a, b FROM t WHERE a = 'x  y'"),
        ("-- first\nselect 1", "select 1"),
        ("insert into t  values (1 ,  2)", "insert into t values (1 , 2)"),
        # The text between two columns names nothing; the text of an expression is its column's name.
        ("select count( * ),  a  +  1 from  t", "select count( * ), a  +  1 from t"),
        ("select a  is distinct  from b  from  t", "select a  is distinct  from b from t"),
        ("select window  + 1 from  t", "select window  + 1 from t"),
        ("select 1 /* kept */", "select 1 /* kept */"),
        # Kept as text by the database, several, open: as they are.
        ("create table  t (a)", "create table  t (a)"),
        ("select 1;  select 2", "select 1;  select 2"),
        ("select 'open  ", "select 'open  "),
    ],
)
def test_forms_of_sqlite(sql: str, form: str) -> None:
    assert canonical_statement(sql, "sqlite") == form


@pytest.mark.parametrize(
    ("sql", "form"),
    [
        ("select  a  +  1 /* x */ from t -- end", "select a + 1 from t"),
        # Comments in comments are no regular language: left alone.
        ("select  1 /* x /* y */ z */", "select  1 /* x /* y */ z */"),
        ("select 'a'  \n 'b'", "select 'a'\n'b'"),
        ("select 'a'   'b'", "select 'a' 'b'"),
        # PostgreSQL joins the strings over one kind of comment and not over the other.
        ("select 'a'  -- x\n  'b'", "select 'a'\n'b'"),
        ("select 'a'  /* x */\n 'b'", "select 'a'  /* x */\n 'b'"),
        ("select $x$ a  b $x$ ,  $1  ::int", "select $x$ a  b $x$ , $1 ::int"),
        ("select E'a\\'  b'", "select E'a\\'  b'"),
        ('select "a  b"  from t;', 'select "a  b" from t'),
        ("do  $$ begin end $$", "do  $$ begin end $$"),
    ],
)
def test_forms_of_postgresql(sql: str, form: str) -> None:
    assert canonical_statement(sql, "postgres") == form
