"""SQL on three invented databases: a bakery, a help desk and a library."""

# ruff: noqa: E501 - a case is one row of a table

from __future__ import annotations

from .task import Task

# In a test, `rows` is what the statement returned, a table's name its rows as objects, and
# `query` runs another statement afterwards.
TASKS = (
    Task(
        name="filter products",
        kind="sql",
        asks="""
            list the names of products {{what}}
            show which products are {{adj}}
            Products {{what}}: just their names, in SQL.
        """,
        tables="products",
        cases="""
            what               adj                       where                  test
            under 2.50         cheaper than 2.50         price < 2.5            p.price < 2.5
            of the kind bread  bread                     kind = 'bread'         p.kind == "bread"
            between 2 and 5    priced between 2 and 5    price BETWEEN 2 AND 5  2 <= p.price <= 5
            ending in "cake"   named something cake      name LIKE '%cake'      p.name.endswith("cake")
            other than bread   not bread                 kind <> 'bread'        p.kind != "bread"
            starting with "b"  named with a leading "b"  name LIKE 'b%'         p.name[0] == "b"
        """,
        code="SELECT name FROM products WHERE {{where}};",
        tests="rows == [(p.name,) for p in products if {{test}}]",
    ),
    Task(
        name="top rows",
        kind="sql",
        asks="""
            get the {{spoken}} of the {{n}} {{which}} {{things}}
            list the {{n}} {{which}} {{things}} with {{spoken}}
        """,
        tables="{{table}}",
        cases="""
            n  which           things     spoken              columns       table     order        key       sign
            3  most expensive  products   names and prices    name, price   products  price DESC   r.price   -1
            2  cheapest        products   names and prices    name, price   products  price        r.price   1
            2  best paid       employees  names and salaries  name, salary  staff     salary DESC  r.salary  -1
            3  oldest          books      titles and years    title, year   books     year         r.year    1
            2  newest          books      titles and years    title, year   books     year DESC    r.year    -1
        """,
        code="SELECT {{columns}} FROM {{table}} ORDER BY {{order}} LIMIT {{n}};",
        tests="""
            [row[1] for row in rows] == sorted(({{key}} for r in {{table}}), key=lambda v: {{sign}} * v)[:{{n}}]
        """,
    ),
    Task(
        name="count per group",
        kind="sql",
        asks="""
            count the {{things}} per {{label}}
            find how many {{things}} there are for each {{label}}
            Number of {{things}} by {{label}}, in SQL please.
        """,
        tables="{{table}}",
        cases="""
            things     label     by        table
            products   kind      kind      products
            orders     customer  customer  orders
            employees  team      team      staff
            tickets    status    status    tickets
            books      author    author    books
        """,
        code="SELECT {{by}}, COUNT(*) FROM {{table}} GROUP BY {{by}};",
        tests="""
            set(rows) == {(r.{{by}}, sum(s.{{by}} == r.{{by}} for s in {{table}})) for r in {{table}}}
        """,
    ),
    Task(
        name="aggregate per group",
        kind="sql",
        asks="""
            compute the {{what}} per {{by}}
            show each {{by}} with its {{what}}
        """,
        tables="{{table}}",
        cases="""
            what            by        func           table     column    py
            average price   kind      AVG(price)     products  price     sum(v) / len(v)
            highest salary  team      MAX(salary)    staff     salary    max(v)
            total copies    author    SUM(copies)    books     copies    sum(v)
            total quantity  customer  SUM(quantity)  orders    quantity  sum(v)
            earliest hire   team      MIN(hired)     staff     hired     min(v)
        """,
        code="SELECT {{by}}, {{func}} FROM {{table}} GROUP BY {{by}};",
        tests="""
            all(value == (lambda v: {{py}})([r.{{column}} for r in {{table}} if r.{{by}} == key]) for key, value in rows)
            len(rows) == len({r.{{by}} for r in {{table}}})
        """,
    ),
    Task(
        name="having",
        kind="sql",
        asks="""
            find each {{by}} with {{what}}
            list every {{by}} that has {{what}}
        """,
        tables="{{table}}",
        cases="""
            by        what                         having              table     test
            kind      more than two products       COUNT(*) > 2        products  len(g) > 2
            customer  at least two orders          COUNT(*) >= 2       orders    len(g) >= 2
            team      an average salary over 4000  AVG(salary) > 4000  staff     sum(r.salary for r in g) / len(g) > 4000
            author    fewer than 4 copies in all   SUM(copies) < 4     books     sum(r.copies for r in g) < 4
            status    only one ticket              COUNT(*) = 1        tickets   len(g) == 1
        """,
        code="SELECT {{by}} FROM {{table}} GROUP BY {{by}} HAVING {{having}};",
        tests="""
            all((lambda g: {{test}})([r for r in {{table}} if r.{{by}} == key]) == ((key,) in rows) for key in {r.{{by}} for r in {{table}}})
        """,
    ),
    Task(
        name="join orders",
        kind="sql",
        asks="""
            list {{what}} with the product names
            join both tables to show {{what}} and product names
        """,
        tables="products orders",
        cases="""
            what                  column      where                  test
            the orders of Ines    o.quantity  o.customer = 'Ines'    o.customer == "Ines"
            orders over 3 pieces  o.quantity  o.quantity > 3         o.quantity > 3
            the orders of April   o.day       o.day LIKE '2024-04%'  o.day[:7] == "2024-04"
            bread orders          o.day       p.kind = 'bread'       p.kind == "bread"
        """,
        code="SELECT p.name, {{column}} FROM orders o JOIN products p ON p.id = o.product_id WHERE {{where}};",
        tests="""
            sorted(rows) == sorted((p.name, {{column}}) for o in orders for p in products if p.id == o.product_id and {{test}})
        """,
    ),
    Task(
        name="join totals",
        kind="sql",
        asks="""
            compute {{what}} for each {{by}}
            show {{what}} by {{by}}
        """,
        tables="products orders",
        cases="""
            what             by            column      sum
            the money spent  customer      o.customer  o.quantity * p.price
            the revenue      product kind  p.kind      o.quantity * p.price
            the pieces sold  product name  p.name      o.quantity
            the revenue      day           o.day       o.quantity * p.price
        """,
        code="SELECT {{column}}, SUM({{sum}}) FROM orders o JOIN products p ON p.id = o.product_id GROUP BY {{column}};",
        tests="""
            all(abs(total - sum({{sum}} for o in orders for p in products if p.id == o.product_id and {{column}} == key)) < 1e-9 for key, total in rows)
            len(rows) == len({{{column}} for o in orders for p in products if p.id == o.product_id})
        """,
    ),
    Task(
        name="change rows",
        kind="sql",
        asks="""
            {{do}}
            change the table to {{do}}
            One SQL statement to {{do}}, please.
        """,
        tables="{{table}}",
        cases="""
            do                                 table     sql                                                           probe                                                 want
            raise all bread prices by 10%      products  UPDATE products SET price = price * 1.1 WHERE kind = 'bread'  SELECT ROUND(price, 2) FROM products WHERE id = 2     1.65
            close every stale ticket           tickets   UPDATE tickets SET status = 'closed' WHERE status = 'stale'   SELECT COUNT(*) FROM tickets WHERE status = 'closed'  3
            delete books without copies        books     DELETE FROM books WHERE copies = 0                            SELECT COUNT(*) FROM books                            4
            move Eva to the ops team           staff     UPDATE staff SET team = 'ops' WHERE name = 'Eva'              SELECT COUNT(*) FROM staff WHERE team = 'ops'         2
            delete tickets opened before May   tickets   DELETE FROM tickets WHERE opened < '2024-05-01'               SELECT COUNT(*) FROM tickets                          6
            give the web team 200 more salary  staff     UPDATE staff SET salary = salary + 200 WHERE team = 'web'     SELECT salary FROM staff WHERE id = 3                 4100
        """,
        code="{{sql}};",
        tests='query("{{probe}}") == [({{want}},)]',
    ),
    Task(
        name="find loans",
        kind="sql",
        asks="""
            list the members who {{what}}
            find all members that {{what}}, each once
            Which members {{what}}? SQL query.
        """,
        tables="loans",
        cases="""
            what                     where                test
            still have a book        returned IS NULL     l.returned is None
            returned a book late     returned > due       l.returned and l.returned > l.due
            had a book due in March  due LIKE '2024-03%'  l.due[:7] == "2024-03"
            returned a book in time  returned <= due      l.returned and l.returned <= l.due
        """,
        code="SELECT DISTINCT member FROM loans WHERE {{where}};",
        tests="set(rows) == {(l.member,) for l in loans if {{test}}}",
    ),
    Task(
        name="without match",
        kind="sql",
        asks="""
            find {{what}}
            use a subquery to list {{what}}
        """,
        tables="{{table}} {{other}}",
        cases="""
            what                        select  table     other   key         row      test
            products nobody ordered     name    products  orders  product_id  r.name   r.id not in [o.product_id for o in orders]
            books that were never lent  title   books     loans   book_id     r.title  r.id not in [o.book_id for o in loans]
        """,
        code="SELECT {{select}} FROM {{table}} WHERE id NOT IN (SELECT {{key}} FROM {{other}});",
        tests="rows == [({{row}},) for r in {{table}} if {{test}}]",
        held_out=True,
    ),
    Task(
        name="above average",
        kind="sql",
        asks="""
            list the {{things}} {{what}}
            show {{things}} {{what}}
        """,
        tables="{{table}}",
        cases="""
            things     what                    column  select  table  op
            employees  paid more than average  salary  name    staff  >
        """,
        code="SELECT {{select}} FROM {{table}} WHERE {{column}} {{op}} (SELECT AVG({{column}}) FROM {{table}});",
        tests="""
            rows == [(r.{{select}},) for r in {{table}} if r.{{column}} {{op}} sum(s.{{column}} for s in {{table}}) / len({{table}})]
        """,
        held_out=True,
    ),
)
