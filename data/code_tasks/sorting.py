"""Sorting, ranking and order."""

# ruff: noqa: E501 - a case is one row of a table

from __future__ import annotations

from .task import Task

TASKS = (
    Task(
        name="sort words",
        asks="""
            sort words by {{what}}
            order a list of words by {{what}}
            My words should be sorted by {{what}}. Python function?
        """,
        cases="""
            name             what                      key                           want
            sort_by_length   length                    len                           ["Oak", "pear", "apple"]
            sort_by_ending   last letter               lambda word: word[-1]         ["apple", "Oak", "pear"]
            sort_any_case    alphabet and ignore case  str.lower                     ["apple", "Oak", "pear"]
            sort_by_p_count  number of "p"             lambda word: word.count("p")  ["Oak", "pear", "apple"]
            sort_by_second   second letter             lambda word: word[1]          ["Oak", "pear", "apple"]
        """,
        code='''
            def {{name}}(words: list[str]) -> list[str]:
                """Sort the words by {{what}}."""
                return sorted(words, key={{key}})
        ''',
        example='{{name}}(["pear", "apple", "Oak"]) == {{want}}',
    ),
    Task(
        name="sort records",
        asks="""
            sort a list of {{thing}} dicts by {{field}}, {{order}} first
            order {{thing}} records so that the {{order}} {{field}} comes first
            Sort my {{thing}} dicts by "{{field}}", {{order}} first. Python.
        """,
        cases="""
            name            thing    arg       field     order    key
            cheapest_first  product  products  price     lowest   product["price"]
            priciest_first  product  products  price     highest  -product["price"]
            youngest_first  player   players   age       lowest   player["age"]
            longest_first   film     films     length    highest  -film["length"]
            nearest_first   station  stations  distance  lowest   station["distance"]
        """,
        code='''
            def {{name}}({{arg}}: list[dict[str, float]]) -> list[dict[str, float]]:
                """Sort by {{field}}, {{order}} first."""
                return sorted({{arg}}, key=lambda {{thing}}: {{key}})
        ''',
        tests="""
            {{name}}([{"{{field}}": 2}, {"{{field}}": 5}])[0] == {"{{field}}": 2 if "{{order}}" == "lowest" else 5}
            {{name}}([{"{{field}}": 5}, {"{{field}}": 2}])[1] == {"{{field}}": 5 if "{{order}}" == "lowest" else 2}
        """,
    ),
    Task(
        name="top n",
        asks="""
            return the {{n}} {{which}} {{items}}
            find the {{n}} {{which}} {{items}} of a list
            From a list I need the {{n}} {{which}} {{items}}. Python.
        """,
        cases="""
            name           n  which                 items    type   expr                                      sample                           want
            top_three      3  largest               numbers  float  sorted(numbers, reverse=True)[:3]         [1, 9, 4, 7]                     [9, 7, 4]
            lowest_two     2  smallest              numbers  float  sorted(numbers)[:2]                       [3, 9, 1]                        [1, 3]
            longest_two    2  longest               words    str    sorted(words, key=len, reverse=True)[:2]  ["a", "bcd", "ef"]               ["bcd", "ef"]
            shortest_four  4  shortest              words    str    sorted(words, key=len)[:4]                ["a", "bc", "d", "efg", "hijk"]  ["a", "d", "bc", "efg"]
            first_five_az  5  alphabetically first  names    str    sorted(names)[:5]                         list("gfedcba")                  list("abcde")
        """,
        code='''
            def {{name}}({{items}}: list[{{type}}]) -> list[{{type}}]:
                """Return the {{n}} {{which}} {{items}}."""
                return {{expr}}
        ''',
        tests="{{name}}({{sample}}) == {{want}}",
    ),
    Task(
        name="sort pairs",
        asks="""
            sort (name, number) pairs by {{what}}
            order a list of name and number tuples by {{what}}
            I have tuples (name, number). Sort them by {{what}}.
        """,
        cases="""
            name             what                   key                 want
            pairs_by_number  number                 pair[1]             ["c", "b", "a"]
            pairs_by_name    name                   pair[0]             ["a", "b", "c"]
            pairs_by_drop    number, largest first  -pair[1]            ["a", "b", "c"]
            pairs_by_size    absolute number        abs(pair[1])        ["b", "a", "c"]
            pairs_by_both    number, then name      (pair[1], pair[0])  ["c", "b", "a"]
        """,
        code='''
            def {{name}}(pairs: list[tuple[str, int]]) -> list[tuple[str, int]]:
                """Sort the pairs by {{what}}."""
                return sorted(pairs, key=lambda pair: {{key}})
        ''',
        tests='[p[0] for p in {{name}}([("b", 1), ("a", 2), ("c", -3)])] == {{want}}',
    ),
    Task(
        name="is sorted",
        asks="""
            check whether a list is {{what}}
            tell if the numbers of a list are {{what}}
            Are the numbers in a list {{what}}? Python check.
        """,
        cases="""
            name           what                 op  yes        no
            is_ascending   in ascending order   <=  [1, 1, 4]  [2, 1]
            is_descending  in descending order  >=  [4, 4, 1]  [1, 2]
            is_rising      strictly rising      <   [1, 2, 4]  [1, 1]
            is_falling     strictly falling     >   [4, 2, 1]  [1, 1]
            is_constant    all the same         ==  [3, 3, 3]  [3, 3, 4]
        """,
        code='''
            def {{name}}(numbers: list[float]) -> bool:
                """Check whether the list is {{what}}."""
                return all(left {{op}} right for left, right in zip(numbers, numbers[1:]))
        ''',
        tests="""
            {{name}}({{yes}}) is True
            {{name}}({{no}}) is False
        """,
    ),
    Task(
        name="partition",
        asks="""
            move all {{what}} to the {{side}} of a list
            put the {{what}} of a list at the {{side}}, otherwise keeping the order
        """,
        cases="""
            name             what              side   test             want
            zeros_last       zeros             end    number == 0      [3, -5, 8, 0]
            negatives_first  negative numbers  front  number >= 0      [-5, 3, 0, 8]
            evens_first      even numbers      front  number % 2 != 0  [0, 8, 3, -5]
            evens_last       even numbers      end    number % 2 == 0  [3, -5, 0, 8]
            positives_last   positive numbers  end    number > 0       [0, -5, 3, 8]
        """,
        code='''
            def {{name}}(numbers: list[int]) -> list[int]:
                """Move the {{what}} to the {{side}}."""
                return sorted(numbers, key=lambda number: {{test}})
        ''',
        example="{{name}}([3, 0, -5, 8]) == {{want}}",
    ),
    Task(
        name="custom order",
        asks="""
            sort {{what}} in the order {{spoken}}
            arrange a list of {{what}} as {{spoken}}
            Put {{what}} into the order {{spoken}} with Python.
        """,
        cases="""
            name             what         spoken                          order
            sort_priorities  priorities   low, medium, high               ["low", "medium", "high"]
            sort_sizes       shirt sizes  S, M, L, XL                     ["S", "M", "L", "XL"]
            sort_stages      stages       draft, review, done             ["draft", "review", "done"]
            sort_meals       meals        breakfast, lunch, dinner        ["breakfast", "lunch", "dinner"]
            sort_seasons     seasons      spring, summer, autumn, winter  ["spring", "summer", "autumn", "winter"]
        """,
        code='''
            def {{name}}(items: list[str]) -> list[str]:
                """Sort {{what}} from first to last."""
                order = {{order}}
                return sorted(items, key=order.index)
        ''',
        tests="{{name}}({{order}}[::-1]) == {{order}}",
    ),
    Task(
        name="ranks",
        asks="""
            give every score its rank, with 1 for the {{which}}
            rank a list of scores so that the {{which}} gets 1
        """,
        cases="""
            name       which    order                         want
            ranks_top  highest  sorted(scores, reverse=True)  [2, 1, 3]
            ranks_low  lowest   sorted(scores)                [2, 3, 1]
        """,
        code='''
            def {{name}}(scores: list[int]) -> list[int]:
                """Rank the scores, the {{which}} first."""
                order = {{order}}
                return [order.index(score) + 1 for score in scores]
        ''',
        example="{{name}}([5, 9, 1]) == {{want}}",
        held_out=True,
    ),
)
