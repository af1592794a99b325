"""Regular expressions, anchored so that they match a whole string."""

# ruff: noqa: E501 - a case is one row of a table

from __future__ import annotations

from .task import Task


def pattern(name: str, asks: str, cases: str, *, held_out: bool = False) -> Task:
    """A task whose answer is its pattern: `hits` must match, `misses` must not."""
    return Task(
        name=name,
        kind="regex",
        asks=asks,
        cases=cases,
        code="{{pattern}}",
        hint="yes: {{hits}}; no: {{misses}}",
        tests="""
            all(pattern.search(text) for text in "{{hits}}".split())
            not any(pattern.search(text) for text in "{{misses}}".split())
        """,
        held_out=held_out,
    )


TASKS = (
    pattern(
        name="codes",
        asks="""
            {{what}}
            codes made of {{what}}
        """,
        cases=r"""
            what                                           pattern               hits                 misses
            three capital letters, a dash and four digits  ^[A-Z]{3}-\d{4}$      ABC-1234             abc-1234 ABC-123
            two letters followed by six digits             ^[A-Za-z]{2}\d{6}$    ab123456             a1234567 ab12345
            one capital letter and two or more digits      ^[A-Z]\d{2,}$         A12 B007             a12 A1
            four groups of four digits joined by dashes    ^\d{4}(?:-\d{4}){3}$  1234-5678-9012-3456  1234-5678
            two digits, a slash and five digits            ^\d{2}/\d{5}$         24/00017             2/00017 24-00017
        """,
    ),
    pattern(
        name="dates",
        asks="""
            dates like {{sample}}
            dates in {{format}} format such as {{sample}}
        """,
        cases=r"""
            sample      format      pattern                                          hits                   misses
            2024-05-31  ISO         ^\d{4}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])$    2024-05-31 1999-12-01  2024-13-01 24-05-31
            31.05.2024  dotted      ^(0[1-9]|[12]\d|3[01])\.(0[1-9]|1[0-2])\.\d{4}$  31.05.2024             32.05.2024 5.5.2024
            05/31/2024  US          ^(0[1-9]|1[0-2])/(0[1-9]|[12]\d|3[01])/\d{4}$    05/31/2024             31/05/2024
            2024-05     year-month  ^\d{4}-(0[1-9]|1[0-2])$                          2024-05                2024-5 2024-13
            20240531    compact     ^\d{4}(0[1-9]|1[0-2])(0[1-9]|[12]\d|3[01])$      20240531               20241331 2024053
        """,
    ),
    pattern(
        name="file names",
        asks="""
            names of {{what}}
            file names of {{what}}
        """,
        cases=r"""
            what                  pattern                 hits                misses
            PNG or JPEG images    ^[^/]+\.(png|jpe?g)$    a.png b.jpg c.jpeg  a.gif d/a.png
            Python test files     ^test_\w+\.py$          test_io.py          io_test.py test_.txt
            numbered log files    ^\w+\.log\.\d+$         app.log.3           app.log app.log.x
            gzipped tar archives  ^[^/]+\.(tar\.gz|tgz)$  a.tar.gz b.tgz      a.gz a.tar
            YAML files            ^[^/]+\.ya?ml$          a.yaml b.yml        a.yam a.json
        """,
    ),
    pattern(
        name="numbers",
        asks="""
            {{what}}
            strings that are {{what}}
        """,
        cases=r"""
            what                               pattern             hits                misses
            integers with an optional sign     ^[+-]?\d+$          7 -12 +3            1.5 --2
            decimals with two places           ^-?\d+\.\d{2}$      3.14 -0.50          3.1 .50
            dollar prices such as $12.99       ^\$\d+\.\d{2}$      $12.99 $0.50        12.99 $12
            whole percentages from 0% to 100%  ^(100|[1-9]?\d)%$   0% 42% 100%         101% 07% 5
            numbers with comma groups          ^\d{1,3}(,\d{3})*$  12 1,204 9,000,000  1204 1,20
        """,
    ),
    pattern(
        name="times",
        asks="""
            {{what}} like {{sample}}
            {{what}} such as {{sample}}
        """,
        cases=r"""
            what                  sample    pattern                         hits            misses
            24-hour times         23:59     ^([01]\d|2[0-3]):[0-5]\d$       23:59 07:00     24:00 7:00
            times with seconds    23:59:07  ^([01]\d|2[0-3])(:[0-5]\d){2}$  23:59:07        23:59 23:60:00
            12-hour times         9:30pm    ^(1[0-2]|[1-9]):[0-5]\d[ap]m$   9:30pm 12:05am  13:00pm 9:30
            durations in minutes  5m30s     ^\d+m[0-5]?\ds$                 5m30s 12m4s     5m 5m70s
        """,
    ),
    pattern(
        name="names",
        asks="""
            names in {{what}}
            identifiers in {{what}}
        """,
        cases=r"""
            what             pattern                        hits            misses
            snake_case       ^[a-z][a-z0-9]*(_[a-z0-9]+)*$  row_id x2       Row_id row__id
            kebab-case       ^[a-z][a-z0-9]*(-[a-z0-9]+)*$  row-id x2       row_id -row
            camelCase        ^[a-z]+([A-Z][a-z0-9]*)*$      rowId maxRowId  RowId row_id
            PascalCase       ^([A-Z][a-z0-9]*)+$            RowId Row2      rowId Row_id
            SCREAMING_SNAKE  ^[A-Z][A-Z0-9]*(_[A-Z0-9]+)*$  MAX_ROWS X2     max_rows _MAX
        """,
    ),
    pattern(
        name="web",
        asks="""
            {{what}}
            {{what}} and nothing else
        """,
        cases=r"""
            what                                   pattern                    hits                      misses
            http or https addresses                ^https?://[\w.-]+(/\S*)?$  https://a.org/x http://b  ftp://a.org
            mail addresses at example.com          ^[\w.+-]+@example\.com$    jo.w@example.com          jo@example.org
            six-digit hex colours such as #1e90ff  ^#[0-9a-fA-F]{6}$          #1e90ff #FFFFFF           #fff 1e90ff
            version numbers like v1.20.3           ^v\d+(\.\d+){2}$           v1.20.3 v0.0.1            1.20.3 v1.2
            port numbers after a host name         ^[\w.-]+:\d{1,5}$          db.local:5432             db.local :80
        """,
    ),
    pattern(
        name="limits",
        asks="""
            {{what}}
            valid {{what}}
        """,
        cases=r"""
            what                                     pattern              hits         misses
            user names of 3 to 16 letters or digits  ^[A-Za-z0-9]{3,16}$  bob anna99   al a_b
            phone numbers with + and 8 to 15 digits  ^\+\d{8,15}$         +4917612345  4917612345 +49
            passwords of 8 or more with a digit      ^(?=.*\d).{8,}$      secret99x    secretxyz a1
        """,
        held_out=True,
    ),
)
