"""Small classic algorithms: search, primes, matrices, brackets, validation."""

# ruff: noqa: E501 - a case is one row of a table

from __future__ import annotations

from .task import Task

TASKS = (
    Task(
        name="first index",
        asks="""
            return the index of the first {{what}}, or -1
            find where the first {{what}} stands in a list, -1 if there is none
            Position of the first {{what}} in a list, else -1? Python.
        """,
        cases="""
            name             what              type   test                yes             want
            first_negative   negative number   float  item < 0            [4, -2, -7]     1
            first_even       even number       int    item % 2 == 0       [3, 5, 8]       2
            first_above_100  number above 100  float  item > 100          [7, 101]        1
            first_blank      blank string      str    not item.strip()    ["a", " "]      1
            first_capital    capitalised word  str    item[:1].isupper()  ["to", "Rome"]  1
        """,
        code='''
            def {{name}}(items: list[{{type}}]) -> int:
                """Return the index of the first {{what}}, or -1."""
                for index, item in enumerate(items):
                    if {{test}}:
                        return index
                return -1
        ''',
        example="{{name}}({{yes}}) == {{want}}",
        tests="{{name}}([]) == -1",
    ),
    Task(
        name="binary search",
        asks="""
            use binary search to {{do}} in a sorted list
            {{do}} of a sorted list with the bisect module
            My list is sorted, so bisect should {{do}}. Python.
        """,
        cases="""
            name         do                             type  funcs                      expr                                                    want
            contains     look for a value               bool  bisect_left, bisect_right  bisect_left(items, value) < bisect_right(items, value)  True
            count_below  count the items below a value  int   bisect_left                bisect_left(items, value)                               1
            count_up_to  count the items up to a value  int   bisect_right               bisect_right(items, value)                              3
            count_above  count the items above a value  int   bisect_right               len(items) - bisect_right(items, value)                 1
        """,
        code='''
            def {{name}}(items: list[int], value: int) -> {{type}}:
                """{{Do}} in a sorted list."""
                from bisect import {{funcs}}
                return {{expr}}
        ''',
        example="{{name}}([1, 3, 3, 8], 3) == {{want}}",
        tests="{{name}}([1, 3, 3, 8], 0) == (4 if '{{name}}' == 'count_above' else 0)",
    ),
    Task(
        name="pairs with",
        asks="""
            {{do}} that {{what}} {{n}}
            go through a list of ints and {{do}} that {{what}} {{n}}
            In a list of integers, {{do}} that {{what}} {{n}}. Python.
        """,
        cases="""
            name            do                   what           n   op  type             result       want
            first_pair_10   find the first pair  adds up to     10  +   tuple[int, int]  pairs[0]     (4, 6)
            count_pairs_10  count the pairs      add up to      10  +   int              len(pairs)   2
            last_pair_12    find the last pair   multiplies to  12  *   tuple[int, int]  pairs[-1]    (6, 2)
            has_sum_13      check for a pair     adds up to     13  +   bool             bool(pairs)  True
            count_pairs_24  count the pairs      multiply to    24  *   int              len(pairs)   1
        """,
        code='''
            def {{name}}(numbers: list[int]) -> {{type}}:
                """{{Do}} that {{what}} {{n}}."""
                from itertools import combinations
                pairs = [(a, b) for a, b in combinations(numbers, 2) if a {{op}} b == {{n}}]
                return {{result}}
        ''',
        tests="{{name}}([4, 6, 7, 3, 2]) == {{want}}",
    ),
    Task(
        name="primes",
        asks="""
            {{do}}
            {{do}} by trial division
            Simple number theory in Python: {{do}}
        """,
        cases="""
            name             do                                     type       body                                                         given  want
            is_prime         check if n is prime                    bool       n > 1 and all(n % d for d in range(2, int(n**0.5) + 1))      29     True
            divisors         list the divisors of n                 list[int]  [d for d in range(1, n + 1) if n % d == 0]                   12     [1, 2, 3, 4, 6, 12]
            primes_below     list the primes below n                list[int]  [p for p in range(2, n) if all(p % d for d in range(2, p))]  12     [2, 3, 5, 7, 11]
            divisor_count    count the divisors of n                int        sum(n % d == 0 for d in range(1, n + 1))                     12     6
            smallest_factor  find the smallest factor of n above 1  int        next(d for d in range(2, n + 1) if n % d == 0)               35     5
        """,
        code='''
            def {{name}}(n: int) -> {{type}}:
                """{{Do}}."""
                return {{body}}
        ''',
        example="{{name}}({{given}}) == {{want}}",
    ),
    Task(
        name="matrix",
        asks="""
            return the {{what}} of a matrix
            compute the {{what}} for a list of rows
            I need the {{what}} of a nested list matrix in Python.
        """,
        cases="""
            name          what                     type             expr                                             want
            row_sums      row sums                 list[int]        [sum(row) for row in matrix]                     [3, 7]
            column_sums   column sums              list[int]        [sum(column) for column in zip(*matrix)]         [4, 6]
            transpose     transpose                list[list[int]]  [list(column) for column in zip(*matrix)]        [[1, 3], [2, 4]]
            diagonal      main diagonal            list[int]        [row[i] for i, row in enumerate(matrix)]         [1, 4]
            quarter_turn  clockwise rotation       list[list[int]]  [list(column)[::-1] for column in zip(*matrix)]  [[3, 1], [4, 2]]
            mirror        left-right mirror image  list[list[int]]  [row[::-1] for row in matrix]                    [[2, 1], [4, 3]]
        """,
        code='''
            def {{name}}(matrix: list[list[int]]) -> {{type}}:
                """Return the {{what}} of the matrix."""
                return {{expr}}
        ''',
        example="{{name}}([[1, 2], [3, 4]]) == {{want}}",
    ),
    Task(
        name="balanced",
        asks="""
            check that all {{what}} in a text are balanced
            tell whether {{what}} are opened and closed correctly in a string
            Are the {{what}} in a string balanced? Python.
        """,
        cases="""
            name               what             open  close
            parens_balanced    parentheses      (     )
            brackets_balanced  square brackets  [     ]
            angles_balanced    angle brackets   <     >
        """,
        code='''
            def {{name}}(text: str) -> bool:
                """Check that the {{what}} are balanced."""
                depth = 0
                for char in text:
                    depth += (char == "{{open}}") - (char == "{{close}}")
                    if depth < 0:
                        return False
                return depth == 0
        ''',
        tests="""
            {{name}}("a{{open}}b{{open}}c{{close}}{{close}}") is True
            {{name}}("{{close}}{{open}}") is False
            {{name}}("{{open}}") is False
        """,
    ),
    Task(
        name="fizz",
        asks="""
            count from 1 to n, saying "{{word}}" for multiples of {{k}}
            list 1 to n as text but write "{{word}}" when {{k}} divides the number
            Like FizzBuzz, but only "{{word}}" for multiples of {{k}}. Python.
        """,
        cases="""
            name       k  word
            fizz_list  3  fizz
            buzz_list  5  buzz
            clap_list  4  clap
            boom_list  7  boom
        """,
        code='''
            def {{name}}(n: int) -> list[str]:
                """Count to n with {{word}} for multiples of {{k}}."""
                return ["{{word}}" if i % {{k}} == 0 else str(i) for i in range(1, n + 1)]
        ''',
        tests="""
            {{name}}({{k}})[-1] == "{{word}}"
            {{name}}({{k}})[0] == "1"
            {{name}}(20).count("{{word}}") == 20 // {{k}}
        """,
    ),
    Task(
        name="validate",
        asks="""
            check that a {{thing}} {{what}}
            make sure that a {{thing}} {{what}}
            Return whether a {{thing}} {{what}}. Python function.
        """,
        cases="""
            name            thing         what                                   test                                               yes         no
            valid_password  password      has at least 8 characters and a digit  len(text) >= 8 and any(c.isdigit() for c in text)  "abcdefg1"  "abcdefgh"
            valid_username  username      has 3 to 12 letters                    3 <= len(text) <= 12 and text.isalpha()            "anna"      "an"
            valid_pin       PIN           has exactly 4 digits                   len(text) == 4 and text.isdigit()                  "0420"      "42o0"
            valid_plate     number plate  starts with 2 capitals, then digits    text[:2].isupper() and text[2:].isdigit()          "KA77"      "Ka77"
            valid_slug      slug          is lower-case with no spaces           text.islower() and " " not in text                 "my-page"   "My page"
        """,
        code='''
            def {{name}}(text: str) -> bool:
                """Check that a {{thing}} {{what}}."""
                return {{test}}
        ''',
        tests="""
            {{name}}({{yes}}) is True
            {{name}}({{no}}) is False
        """,
    ),
    Task(
        name="count steps",
        asks="""
            count {{what}}
            use a while loop to count {{what}}
            A while loop in Python should count {{what}}.
        """,
        cases="""
            name            what                                  test        step                                 given  want
            collatz_steps   the Collatz steps from n down to 1    n != 1      n // 2 if n % 2 == 0 else 3 * n + 1  6      8
            digit_rounds    the digit sums until n has one digit  n > 9       sum(int(digit) for digit in str(n))  199    3
            halving_steps   the halvings until n is zero          n > 0       n // 2                               5      3
            factors_of_3    how often 3 divides a positive n      n % 3 == 0  n // 3                               18     2
            doubling_steps  the doublings until n reaches 100     n < 100     n * 2                                30     2
        """,
        code='''
            def {{name}}(n: int) -> int:
                """Count {{what}}."""
                steps = 0
                while {{test}}:
                    n = {{step}}
                    steps += 1
                return steps
        ''',
        example="{{name}}({{given}}) == {{want}}",
    ),
    Task(
        name="distance",
        asks="""
            compute the {{what}} distance between two {{things}}
            measure the {{what}} distance of two {{things}}
        """,
        cases="""
            name       what       things   in           out    expr                                   given             want
            hamming    Hamming    strings  str          int    sum(x != y for x, y in zip(a, b))      "karma", "kappa"  2
            manhattan  Manhattan  points   list[float]  float  sum(abs(x - y) for x, y in zip(a, b))  [1, 2], [4, 0]    5
        """,
        code='''
            def {{name}}(a: {{in}}, b: {{in}}) -> {{out}}:
                """Compute the {{what}} distance."""
                return {{expr}}
        ''',
        example="{{name}}({{given}}) == {{want}}",
        held_out=True,
    ),
)
