"""Dictionaries and lists of records."""

# ruff: noqa: E501 - a case is one row of a table

from __future__ import annotations

from .task import Task

TASKS = (
    Task(
        name="group",
        asks="""
            group {{what}} by {{how}}
            sort {{what}} into a dict of lists, keyed by {{how}}
            I have {{what}}. Group them by {{how}} in Python.
        """,
        cases="""
            name              what        arg     key                  how                 in   out  sample            want
            group_by_initial  words       word    word[0]              their first letter  str  str  ["as", "at"]      {"a": ["as", "at"]}
            group_by_length   words       word    len(word)            their length        str  int  ["as", "b"]       {2: ["as"], 1: ["b"]}
            group_by_tens     numbers     number  number // 10         their tens          int  int  [31, 37, 4]       {3: [31, 37], 0: [4]}
            group_by_parity   numbers     number  number % 2           their parity        int  int  [3, 4]            {1: [3], 0: [4]}
            group_by_suffix   file names  name    name.split(".")[-1]  their extension     str  str  ["a.py", "b.md"]  {"py": ["a.py"], "md": ["b.md"]}
        """,
        code='''
            def {{name}}(items: list[{{in}}]) -> dict[{{out}}, list[{{in}}]]:
                """Group {{what}} by {{how}}."""
                groups: dict[{{out}}, list[{{in}}]] = {}
                for {{arg}} in items:
                    groups.setdefault({{key}}, []).append({{arg}})
                return groups
        ''',
        tests="{{name}}({{sample}}) == {{want}}",
    ),
    Task(
        name="filter dict",
        asks="""
            keep the entries of a {{thing}} dict whose {{what}}
            filter a {{thing}} dict, keeping entries whose {{what}}
            Drop everything from my {{thing}} dict except entries whose {{what}}.
        """,
        cases="""
            name             thing   type   what                   test            data                 want
            passing_scores   score   int    value is at least 50   value >= 50     {"a": 50, "b": 49}   {"a": 50}
            cheap_items      price   float  value is below 10      value < 10      {"a": 9.5, "b": 10}  {"a": 9.5}
            in_stock         stock   int    value is above zero    value > 0       {"a": 0, "b": 2}     {"b": 2}
            filled_settings  config  str    value is not empty     value           {"a": "", "b": "x"}  {"b": "x"}
            public_settings  config  str    key has no underscore  "_" not in key  {"a": "", "_b": ""}  {"a": ""}
        """,
        code='''
            def {{name}}(data: dict[str, {{type}}]) -> dict[str, {{type}}]:
                """Keep the entries whose {{what}}."""
                return {key: value for key, value in data.items() if {{test}}}
        ''',
        example="{{name}}({{data}}) == {{want}}",
    ),
    Task(
        name="rewrite dict",
        asks="""
            {{do}} of a dict
            build a new dict where we {{do}}
            Given a dict of strings, {{do}}. Python please.
        """,
        cases="""
            name            do                        type  key          value          want
            swap_pairs      swap the keys and values  str   value        key            {" x ": "Id"}
            lower_keys      lower-case the keys       str   key.lower()  value          {"id": " x "}
            trim_values     trim the values           str   key          value.strip()  {"Id": "x"}
            quote_values    quote the values          str   key          repr(value)    {"Id": "' x '"}
            measure_values  take the value lengths    int   key          len(value)     {"Id": 3}
        """,
        code='''
            def {{name}}(data: dict[str, str]) -> dict[str, {{type}}]:
                """{{Do}}."""
                return {{{key}}: {{value}} for key, value in data.items()}
        ''',
        tests='{{name}}({"Id": " x "}) == {{want}}',
    ),
    Task(
        name="best key",
        asks="""
            return the {{thing}} with the {{best}} {{what}} from a dict
            look up which {{thing}} has the {{best}} {{what}}
            Which {{thing}} has the {{best}} {{what}}? Write it for a dict in Python.
        """,
        cases="""
            name              thing    best     what         arg           type   pick
            top_player        player   highest  score        scores        int    max
            cheapest_product  product  lowest   price        prices        float  min
            busiest_city      city     highest  visit count  visits        int    max
            lightest_parcel   parcel   lowest   weight       weights       float  min
            warmest_room      room     highest  temperature  temperatures  float  max
        """,
        code='''
            def {{name}}({{arg}}: dict[str, {{type}}]) -> str:
                """Return the {{thing}} with the {{best}} {{what}}."""
                return {{pick}}({{arg}}, key=lambda {{thing}}: {{arg}}[{{thing}}])
        ''',
        tests="""
            {{name}}({"a": 3, "b": 8}) == ("b" if "{{pick}}" == "max" else "a")
        """,
    ),
    Task(
        name="merge dicts",
        asks="""
            merge two dicts of numbers, {{how}} when a key is in both
            combine two count dicts by {{how}} for shared keys
        """,
        cases="""
            name           how                       expr                                      want
            merge_sum      adding the values         left.get(key, 0) + right.get(key, 0)      {"a": 1, "b": 7, "c": 4}
            merge_first    keeping the first value   left.get(key, right.get(key, 0))          {"a": 1, "b": 2, "c": 4}
            merge_second   keeping the second value  right.get(key, left.get(key, 0))          {"a": 1, "b": 5, "c": 4}
            merge_largest  keeping the larger value  max(left.get(key, 0), right.get(key, 0))  {"a": 1, "b": 5, "c": 4}
        """,
        code='''
            def {{name}}(left: dict[str, int], right: dict[str, int]) -> dict[str, int]:
                """Merge two dicts, {{how}} of shared keys."""
                return {key: {{expr}} for key in {**left, **right}}
        ''',
        tests='{{name}}({"a": 1, "b": 2}, {"b": 5, "c": 4}) == {{want}}',
    ),
    Task(
        name="pluck",
        asks="""
            collect the {{field}} of every {{thing}} in a list of dicts
            list all {{field}} values from {{thing}} dicts that have one
            I have dicts, one per {{thing}}, and need every {{field}} in a list.
        """,
        cases="""
            name         field  thing  arg
            user_emails  email  user   users
            city_names   name   city   cities
            book_titles  title  book   books
            order_codes  code   order  orders
            photo_paths  path   photo  photos
        """,
        code='''
            def {{name}}({{arg}}: list[dict[str, str]]) -> list[str]:
                """Collect the {{field}} of every {{thing}}."""
                return [{{thing}}["{{field}}"] for {{thing}} in {{arg}} if "{{field}}" in {{thing}}]
        ''',
        tests='{{name}}([{"{{field}}": "x"}, {"other": "y"}]) == ["x"]',
    ),
    Task(
        name="total records",
        asks="""
            compute the {{what}} {{field}} over a list of {{thing}} dicts
            get the {{what}} {{field}} from a list of dicts, one per {{thing}}
            What is the {{what}} {{field}} of all {{thing}} records? Python function.
        """,
        cases="""
            name           what     field   thing    expr                       want
            total_price    total    price   order    sum(values)                10
            mean_age       mean     age     person   sum(values) / len(values)  5
            largest_size   largest  size    file     max(values)                7
            fewest_nights  fewest   nights  booking  min(values)                3
            total_weight   total    weight  parcel   sum(values)                10
        """,
        code='''
            def {{name}}(rows: list[dict[str, float]]) -> float:
                """Return the {{what}} {{field}} of all {{thing}} records."""
                values = [row["{{field}}"] for row in rows]
                return {{expr}}
        ''',
        tests='{{name}}([{"{{field}}": 3}, {"{{field}}": 7}]) == {{want}}',
    ),
    Task(
        name="pick keys",
        asks="""
            copy a {{thing}} dict {{what}}
            return a {{thing}} dict {{what}}
        """,
        cases="""
            name          thing    what                             test                          want
            public_user   user     without "password" and "token"   not in ("password", "token")  {"id": "1", "name": "b"}
            short_user    user     with only "id" and "name"        in ("id", "name")             {"id": "1", "name": "b"}
            bare_request  request  without "token" and "cookie"     not in ("token", "cookie")    {"id": "1", "name": "b", "password": "c"}
            login_form    form     with only "name" and "password"  in ("name", "password")       {"name": "b", "password": "c"}
        """,
        code='''
            def {{name}}({{thing}}: dict[str, str]) -> dict[str, str]:
                """Copy the {{thing}} {{what}}."""
                return {key: {{thing}}[key] for key in {{thing}} if key {{test}}}
        ''',
        tests="""
            {{name}}({"id": "1", "name": "b", "password": "c", "token": "d"}) == {{want}}
        """,
    ),
    Task(
        name="tally",
        asks="""
            count how often each {{what}} occurs in {{source}}
            build a tally of each {{what}} in {{source}}
        """,
        cases="""
            name           what         source  arg   type  each                    want
            letter_counts  letter       a word  word  str   word                    {"n": 2, "o": 2}
            length_counts  word length  a text  text  int   map(len, text.split())  {4: 1}
        """,
        code='''
            def {{name}}({{arg}}: str) -> dict[{{type}}, int]:
                """Count each {{what}} in {{source}}."""
                counts: dict[{{type}}, int] = {}
                for item in {{each}}:
                    counts[item] = counts.get(item, 0) + 1
                return counts
        ''',
        example='{{name}}("noon") == {{want}}',
        held_out=True,
    ),
)
