"""Functions that call themselves: numbers, nested lists, texts, trees."""

# ruff: noqa: E501 - a case is one row of a table

from __future__ import annotations

from .task import Task

TASKS = (
    Task(
        name="on numbers",
        asks="""
            compute {{what}} recursively
            use recursion to find {{what}}
            Recursive Python function for {{what}}, please.
        """,
        cases="""
            name        what                         base    start  step                                 want
            factorial   n factorial                  n < 2   1      n * factorial(n - 1)                 120
            fibonacci   the nth Fibonacci number     n < 2   n      fibonacci(n - 1) + fibonacci(n - 2)  5
            triangular  the nth triangular number    n < 1   0      n + triangular(n - 1)                15
            digit_sum   the digit sum of n           n < 10  n      n % 10 + digit_sum(n // 10)          5
            bit_count   the number of one bits in n  n < 2   n      n % 2 + bit_count(n // 2)            2
            halvings    how often n can be halved    n < 2   0      1 + halvings(n // 2)                 2
        """,
        code='''
            def {{name}}(n: int) -> int:
                """Compute {{what}}."""
                if {{base}}:
                    return {{start}}
                return {{step}}
        ''',
        example="{{name}}(5) == {{want}}",
    ),
    Task(
        name="nested lists",
        asks="""
            {{do}} a nested list, recursively
            use recursion to {{do}} a list of lists of any depth
        """,
        cases="""
            name          do                          type       leaf    step                                               want
            nested_sum    add up                      int        tree    sum(nested_sum(item) for item in tree)             10
            nested_max    find the largest number in  int        tree    max(nested_max(item) for item in tree)             7
            nested_count  count the numbers in        int        1       sum(nested_count(item) for item in tree)           3
            nested_depth  measure the depth of        int        0       1 + max(nested_depth(item) for item in tree)       3
            flatten       flatten                     list[int]  [tree]  [leaf for item in tree for leaf in flatten(item)]  [1, 2, 7]
        """,
        code='''
            def {{name}}(tree: list | int) -> {{type}}:
                """{{Do}} a nested list."""
                if isinstance(tree, int):
                    return {{leaf}}
                return {{step}}
        ''',
        example="{{name}}([1, [2, [7]]]) == {{want}}",
    ),
    Task(
        name="on texts",
        asks="""
            {{do}} with recursion
            {{do}} recursively, without a loop
            No loops allowed: {{do}}, by recursion in Python.
        """,
        cases="""
            name           do                               type  start  step                                                 given   want
            reverse_text   reverse a string                 str   text   reverse_text(text[1:]) + text[0]                     "abc"   "cba"
            spread_text    put a dot after each character   str   text   text[0] + "." + spread_text(text[1:])                "abc"   "a.b.c."
            count_letters  count the letters of a string    int   0      text[0].isalpha() + count_letters(text[1:])          "a1b"   2
            keep_digits    keep only the digits of a text   str   text   text[0] * text[0].isdigit() + keep_digits(text[1:])  "a1b2"  "12"
            double_text    double each character of a text  str   text   text[0] * 2 + double_text(text[1:])                  "abc"   "aabbcc"
        """,
        code='''
            def {{name}}(text: str) -> {{type}}:
                """{{Do}}."""
                if not text:
                    return {{start}}
                return {{step}}
        ''',
        example="{{name}}({{given}}) == {{want}}",
    ),
    Task(
        name="trees",
        asks="""
            {{do}} of a tree of dicts with "value" and "children"
            walk a tree of dicts with "value" and "children" to {{do}}
            My nodes are dicts with "value" and "children"; {{do}} in Python.
        """,
        cases="""
            name         do                      type  step                                                    want
            tree_sum     add up all values       int   node["value"] + sum(map(tree_sum, node["children"]))    6
            tree_size    count the nodes         int   1 + sum(map(tree_size, node["children"]))               3
            tree_max     find the largest value  int   max([node["value"], *map(tree_max, node["children"])])  3
            tree_height  find the height         int   1 + max(map(tree_height, node["children"]), default=0)  2
        """,
        code='''
            def {{name}}(node: dict) -> int:
                """{{Do}} of a tree."""
                return {{step}}
        ''',
        tests="""
            {{name}}({"value": 1, "children": [{"value": v, "children": []} for v in (2, 3)]}) == {{want}}
        """,
    ),
    Task(
        name="two numbers",
        asks="""
            compute {{what}} with recursion
            find {{what}}, recursively
            What would a recursive Python function for {{what}} be?
        """,
        cases="""
            name         what                                 base         start  step                                     given   want
            common_part  the greatest common divisor          b == 0       a      common_part(b, a % b)                    12, 18  6
            power_of     a to the power of b                  b == 0       1      a * power_of(a, b - 1)                   2, 5    32
            times        a times b by adding                  b == 0       0      a + times(a, b - 1)                      6, 7    42
            choose       the binomial coefficient of a and b  b in (0, a)  1      choose(a - 1, b - 1) + choose(a - 1, b)  5, 2    10
            range_sum    the sum of all integers from a to b  a > b        0      a + range_sum(a + 1, b)                  3, 6    18
        """,
        code='''
            def {{name}}(a: int, b: int) -> int:
                """Compute {{what}}."""
                if {{base}}:
                    return {{start}}
                return {{step}}
        ''',
        example="{{name}}({{given}}) == {{want}}",
    ),
    Task(
        name="subsets",
        asks="""
            list all {{what}} of a list with recursion
            generate all {{what}} of a list recursively
        """,
        cases="""
            name     what     step                                             want
            subsets  subsets  rest + [[items[0], *subset] for subset in rest]  [[], [2], [1], [1, 2]]
        """,
        code='''
            def {{name}}(items: list[int]) -> list[list[int]]:
                """List all {{what}} of the items."""
                if not items:
                    return [[]]
                rest = {{name}}(items[1:])
                return {{step}}
        ''',
        example="{{name}}([1, 2]) == {{want}}",
        held_out=True,
    ),
)
