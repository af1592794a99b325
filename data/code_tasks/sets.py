"""Sets, duplicates and membership."""

# ruff: noqa: E501 - a case is one row of a table

from __future__ import annotations

from .task import Task

TASKS = (
    Task(
        name="set algebra",
        asks="""
            compare two lists and return the sorted items {{what}}
            take two lists and give back the items {{what}}, sorted
            Two lists come in; I need the items {{what}}, sorted. Python.
        """,
        cases="""
            name           what                    op  want
            in_both        in both lists           &   [2, 3]
            in_either      in at least one list    |   [1, 2, 3, 4]
            only_in_first  in the first list only  -   [1]
            in_one_only    in exactly one list     ^   [1, 4]
        """,
        code='''
            def {{name}}(first: list[int], second: list[int]) -> list[int]:
                """Return the sorted items {{what}}."""
                return sorted(set(first) {{op}} set(second))
        ''',
        example="{{name}}([3, 1, 2], [2, 3, 4]) == {{want}}",
    ),
    Task(
        name="repeats",
        asks="""
            find the {{items}} that occur {{what}} in a list
            return all {{items}} occurring {{what}}
            Which {{items}} occur {{what}} in a list? Python function, sorted result.
        """,
        cases="""
            name            items  type  what              test  want
            repeated_words  words  str   more than once    > 1   ["b", "c"]
            unique_words    words  str   exactly once      == 1  ["a"]
            paired_ids      ids    str   exactly twice     == 2  ["b"]
            frequent_tags   tags   str   at least 3 times  >= 3  ["c"]
            rare_names      names  str   at most twice     <= 2  ["a", "b"]
        """,
        code='''
            def {{name}}({{items}}: list[{{type}}]) -> list[{{type}}]:
                """Return the {{items}} that occur {{what}}."""
                return sorted(item for item in set({{items}}) if {{items}}.count(item) {{test}})
        ''',
        tests='{{name}}(["a", "b", "c", "b", "c", "c"]) == {{want}}',
    ),
    Task(
        name="dedupe",
        asks="""
            drop {{what}} from a list but keep the order
            remove {{what}}, keeping the first of each
            Keep the first of each and drop {{what}}. Python, order matters.
        """,
        cases="""
            name                what                             type  key           sample             want
            unique_ignore_case  words equal up to case           str   item.lower()  ["a", "A", "b"]    ["a", "b"]
            unique_magnitudes   numbers equal up to sign         int   abs(item)     [3, -3, 2]         [3, 2]
            unique_initials     words whose initial came before  str   item[0]       ["ab", "ac", "b"]  ["ab", "b"]
            unique_lengths      words whose length came before   str   len(item)     ["ab", "ac", "b"]  ["ab", "b"]
            unique_trimmed      lines equal up to spaces         str   item.strip()  ["a ", " a", "b"]  ["a ", "b"]
        """,
        code='''
            def {{name}}(items: list[{{type}}]) -> list[{{type}}]:
                """Drop {{what}}, keeping the order."""
                first: dict[object, {{type}}] = {}
                for item in items:
                    first.setdefault({{key}}, item)
                return list(first.values())
        ''',
        tests="{{name}}({{sample}}) == {{want}}",
    ),
    Task(
        name="required",
        asks="""
            check that a {{thing}} has {{what}}
            tell whether {{what}} are all present in a {{thing}}
            validate that a {{thing}} contains {{what}}
        """,
        cases="""
            name               thing    what                        needed
            has_login_fields   form     "user" and "password"       {"user", "password"}
            has_point_fields   point    "x" and "y"                 {"x", "y"}
            has_contact_parts  contact  "street", "city" and "zip"  {"street", "city", "zip"}
            has_job_keys       job      "model" and "data"          {"model", "data"}
            has_color_keys     color    "r", "g" and "b"            {"r", "g", "b"}
        """,
        code='''
            def {{name}}({{thing}}: dict[str, str]) -> bool:
                """Check that the {{thing}} has {{what}}."""
                return {{needed}} <= {{thing}}.keys()
        ''',
        tests="""
            {{name}}(dict.fromkeys({{needed}} | {"more"}, "v")) is True
            {{name}}({"more": "v"}) is False
        """,
    ),
    Task(
        name="letter sets",
        asks="""
            check whether {{what}}
            decide if {{what}}
            Is it true that {{what}}? Make that a Python function.
        """,
        cases="""
            name           what                                   test                                  yes       no
            is_isogram     a word has no repeated letter          len(set(text)) == len(text)           "stone"   "moon"
            is_binary      a text has only the digits 0 and 1     set(text) <= set("01")                "0110"    "012"
            is_vowel_free  a lower-case word has no vowels        not set(text) & set("aeiou")          "rhythm"  "rhyme"
            is_hex         a text has only lower-case hex digits  set(text) <= set("0123456789abcdef")  "ff09"    "fg09"
        """,
        code='''
            def {{name}}(text: str) -> bool:
                """Check whether {{what}}."""
                return {{test}}
        ''',
        tests="""
            {{name}}({{yes}}) is True
            {{name}}({{no}}) is False
        """,
    ),
    Task(
        name="overlap",
        asks="""
            measure how much two lists of {{what}} overlap, from 0 to 1
            compute the Jaccard similarity of two lists of {{what}}
        """,
        cases="""
            name         what  type
            tag_overlap  tags  str
        """,
        code='''
            def {{name}}(left: list[{{type}}], right: list[{{type}}]) -> float:
                """Return the share of {{what}} that both lists have."""
                shared = set(left) & set(right)
                return len(shared) / len(set(left) | set(right))
        ''',
        example='{{name}}(["a", "b"], ["b"]) == 0.5',
        held_out=True,
    ),
)
