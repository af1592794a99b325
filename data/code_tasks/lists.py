"""Lists: filtering, mapping, slicing, windows."""

from __future__ import annotations

from .task import Task

TASKS = (
    Task(
        name="chunks",
        asks="""
            split a list into chunks of {{n}}
            cut a list of {{what}} into groups of {{n}}
            group a list into pieces with {{n}} {{what}} each
        """,
        cases="""
            name            n   what     type
            pairs_of_words  2   words    str
            triples         3   numbers  int
            pages_of_10     10  titles   str
            batches_of_16   16  numbers  int
            rows_of_4       4   scores   float
        """,
        code='''
            def {{name}}(items: list[{{type}}]) -> list[list[{{type}}]]:
                """Split the list into chunks of {{n}} items."""
                return [items[start : start + {{n}}] for start in range(0, len(items), {{n}})]
        ''',
        tests="""
            [len(chunk) for chunk in {{name}}(list(range(2 * {{n}} + 1)))] == [{{n}}, {{n}}, 1]
            {{name}}([]) == []
        """,
    ),
    Task(
        name="filter numbers",
        asks="""
            keep only the {{what}} of a list
            filter a list of integers down to the {{what}}
            From a list of ints I want just the {{what}}. Python function?
        """,
        cases="""
            name           what              test             want
            keep_even      even numbers      number % 2 == 0  [0, -4, 18]
            keep_odd       odd numbers       number % 2       [7, 9]
            keep_positive  positive numbers  number > 0       [7, 9, 18]
            keep_negative  negative numbers  number < 0       [-4]
            keep_threes    multiples of 3    number % 3 == 0  [0, 9, 18]
        """,
        code='''
            def {{name}}(numbers: list[int]) -> list[int]:
                """Keep the {{what}}."""
                return [number for number in numbers if {{test}}]
        ''',
        example="{{name}}([7, 0, -4, 9, 18]) == {{want}}",
    ),
    Task(
        name="map numbers",
        asks="""
            {{do}} every number in a list
            {{do}} each element of a list of numbers
            Take a list of numbers and {{do}} all of them, in Python.
        """,
        cases="""
            name        do      expr        want
            square_all  square  number**2   [1, 16]
            cube_all    cube    number**3   [-1, 64]
            double_all  double  number * 2  [-2, 8]
            halve_all   halve   number / 2  [-0.5, 2]
            negate_all  negate  -number     [1, -4]
        """,
        code='''
            def {{name}}(numbers: list[float]) -> list[float]:
                """{{Do}} every number."""
                return [{{expr}} for number in numbers]
        ''',
        example="{{name}}([-1, 4]) == {{want}}",
    ),
    Task(
        name="running",
        asks="""
            compute the running {{what}} of a list
            return a list with the {{what}} so far at every position
            I want the running {{what}} over a list of numbers, in Python.
        """,
        cases="""
            name             what     step               want
            running_total    total    best + number      [3, 4, 9]
            running_maximum  maximum  max(best, number)  [3, 3, 5]
            running_minimum  minimum  min(best, number)  [3, 1, 1]
            running_product  product  best * number      [3, 3, 15]
        """,
        code='''
            def {{name}}(numbers: list[int]) -> list[int]:
                """Return the running {{what}}."""
                from itertools import accumulate
                return list(accumulate(numbers, lambda best, number: {{step}}))
        ''',
        example="{{name}}([3, 1, 5]) == {{want}}",
    ),
    Task(
        name="slices",
        asks="""
            return {{what}} of a list
            take {{what}} of a list
            Python one: give back {{what}} of a list
        """,
        cases="""
            name          what                             expr                      want
            every_second  every second item                items[::2]                ["a", "c", "e"]
            every_third   every third item                 items[::3]                ["a", "d"]
            without_ends  all but the first and last item  items[1:-1]               ["b", "c", "d"]
            last_three    the last three items             items[-3:]                ["c", "d", "e"]
            first_half    the first half                   items[: len(items) // 2]  ["a", "b"]
        """,
        code='''
            def {{name}}(items: list[str]) -> list[str]:
                """Return {{what}}."""
                return {{expr}}
        ''',
        example='{{name}}(["a", "b", "c", "d", "e"]) == {{want}}',
    ),
    Task(
        name="rotate",
        asks="""
            rotate a list {{n}} places to the {{side}}
            move every item of a list {{n}} positions {{side}}, wrapping around
        """,
        cases="""
            name            n  side   cut  want
            rotate_left_2   2  left   2    [3, 4, 5, 1, 2]
            rotate_right_2  2  right  -2   [4, 5, 1, 2, 3]
            rotate_left_3   3  left   3    [4, 5, 1, 2, 3]
            rotate_right_4  4  right  -4   [2, 3, 4, 5, 1]
            rotate_left_4   4  left   4    [5, 1, 2, 3, 4]
        """,
        code='''
            def {{name}}(items: list[int]) -> list[int]:
                """Rotate the list {{n}} places to the {{side}}."""
                return items[{{cut}}:] + items[:{{cut}}]
        ''',
        example="{{name}}([1, 2, 3, 4, 5]) == {{want}}",
    ),
    Task(
        name="neighbours",
        asks="""
            compute the {{what}} of neighbouring numbers in a list
            list the {{what}} of each pair of neighbours
            For every two adjacent numbers, give me the {{what}}. Python.
        """,
        cases="""
            name                what         expr                want
            neighbour_gaps      differences  right - left        [3, -4]
            neighbour_sums      sums         left + right        [7, 6]
            neighbour_products  products     left * right        [10, 5]
            neighbour_maxima    maxima       max(left, right)    [5, 5]
            neighbour_means     means        (left + right) / 2  [3.5, 3]
        """,
        code='''
            def {{name}}(numbers: list[float]) -> list[float]:
                """Return the {{what}} of neighbouring numbers."""
                return [{{expr}} for left, right in zip(numbers, numbers[1:])]
        ''',
        example="{{name}}([2, 5, 1]) == {{want}}",
    ),
    Task(
        name="positions",
        asks="""
            return the indexes of all {{what}} in a list
            find at which positions a list holds {{what}}
            Where in my list are the {{what}}? I need their indexes in Python.
        """,
        cases="""
            name             what              type        test                items          want
            zero_positions   zeros             int         item == 0           [0, 4, 0]      [0, 2]
            blank_positions  empty strings     str         not item            ["", "a", ""]  [0, 2]
            none_positions   missing values    int | None  item is None        [None, 0, 5]   [0]
            peak_positions   maximum values    int         item == max(items)  [3, 9, 9]      [1, 2]
            negative_spots   negative numbers  float       item < 0            [2.5, -1.0]    [1]
        """,
        code='''
            def {{name}}(items: list[{{type}}]) -> list[int]:
                """Return the indexes of all {{what}}."""
                return [index for index, item in enumerate(items) if {{test}}]
        ''',
        example="{{name}}({{items}}) == {{want}}",
    ),
    Task(
        name="windows",
        asks="""
            compute the {{what}} of every {{n}} consecutive numbers
            slide a window of {{n}} over a list and return each {{what}}
            calculate the moving {{what}} with a window of {{n}}
        """,
        cases="""
            name          what     n  less  expr                       want
            moving_sum    sum      3  2     sum(window)                [9, 6]
            moving_mean   mean     3  2     sum(window) / 3            [3, 2]
            moving_max    maximum  2  1     max(window)                [5, 5, 1]
            moving_min    minimum  2  1     min(window)                [3, 1, 0]
            moving_range  range    4  3     max(window) - min(window)  [5]
        """,
        code='''
            def {{name}}(numbers: list[float]) -> list[float]:
                """Return the moving {{what}} over {{n}} numbers."""
                windows = [numbers[i : i + {{n}}] for i in range(len(numbers) - {{less}})]
                return [{{expr}} for window in windows]
        ''',
        example="{{name}}([3, 5, 1, 0]) == {{want}}",
    ),
    Task(
        name="insert between",
        asks="""
            put {{what}} between all items of a list
            separate the items of a list with {{what}}
        """,
        cases="""
            name           what    type  value
            zeros_between  a zero  int   0
            dots_between   a dot   str   "."
        """,
        code='''
            def {{name}}(items: list[{{type}}]) -> list[{{type}}]:
                """Put {{what}} between all items."""
                spread = [{{value}}] * (2 * len(items) - 1)
                spread[::2] = items
                return spread
        ''',
        example="{{name}}([1, 2]) == [1, {{value}}, 2]",
        held_out=True,
    ),
)
