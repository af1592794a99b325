"""One-line shell commands: find, grep, awk, sort, sed and friends."""

# ruff: noqa: E501 - a case is one row of a table

from __future__ import annotations

from .task import Task

TASKS = (
    Task(
        name="find files",
        kind="shell",
        asks="""
            find all {{what}} below the current folder
            list every one of the {{what}} under this directory
        """,
        cases="""
            what                           test
            Python files                   -name '*.py'
            files over 100 MB              -size +100M
            files changed in the last day  -mtime -1
            empty files                    -empty
            log files older than 30 days   -name '*.log' -mtime +30
            JPEG images in any case        -iname '*.jpg'
        """,
        code="find . -type f {{test}}",
    ),
    Task(
        name="find and act",
        kind="shell",
        asks="""
            {{do}} all {{what}} under the current folder
            {{do}} every one of the {{what}} below this directory
        """,
        cases="""
            do                  what            test           action
            delete              .tmp files      -name '*.tmp'  -delete
            count lines in      Markdown files  -name '*.md'   -exec wc -l {} +
            compress            .log files      -name '*.log'  -exec gzip {} +
            mark as executable  shell scripts   -name '*.sh'   -exec chmod +x {} +
            show sizes of       CSV files       -name '*.csv'  -exec du -h {} +
        """,
        code="find . -type f {{test}} {{action}}",
    ),
    Task(
        name="grep tree",
        kind="shell",
        asks="""
            {{do}} "{{text}}" in {{where}}
            search {{where}} and {{do}} "{{text}}"
        """,
        cases="""
            do                              text      where             flags  scope
            list the files that contain     TODO      all Python files  -rl    --include='*.py' .
            show numbered lines with        timeout   the src folder    -rn    src
            count per file the lines with   ERROR     the logs folder   -rc    logs
            find, in any case,              password  all YAML files    -rin   --include='*.yaml' .
            show lines with the whole word  main      all C files       -rw    --include='*.c' .
        """,
        code="grep {{flags}} '{{text}}' {{scope}}",
    ),
    Task(
        name="awk columns",
        kind="shell",
        asks="""
            {{do}} column {{n}} of {{file}}
            use awk to {{do}} column {{n}} in {{file}}
        """,
        cases="""
            do                          n  file       prefix  program
            add up                      3  sales.csv  -F,     {sum += $3} END {print sum}
            print only                  2  users.txt  -F:     {print $2}
            average                     4  times.csv  -F,     {sum += $4} END {print sum / NR}
            find the maximum of         1  size.csv   -F,     $1 > max {max = $1} END {print max}
            print the unique values of  5  log.csv    -F,     !seen[$5]++ {print $5}
        """,
        code="awk {{prefix}} '{{program}}' {{file}}",
    ),
    Task(
        name="sort and count",
        kind="shell",
        asks="""
            show the {{n}} most common {{what}} in {{file}}
            count the {{what}} of {{file}} and print the top {{n}}
        """,
        cases="""
            n   what          file        cut
            10  lines         access.log  sort access.log
            5   first words   notes.txt   cut -d' ' -f1 notes.txt | sort
            3   third fields  data.csv    cut -d, -f3 data.csv | sort
            20  words         book.txt    tr -s ' ' '\\n' < book.txt | sort
            7   user names    passwd.txt  cut -d: -f1 passwd.txt | sort
        """,
        code="{{cut}} | uniq -c | sort -rn | head -n {{n}}",
    ),
    Task(
        name="part of file",
        kind="shell",
        asks="""
            print {{what}} of {{file}}
            show me {{what}} of {{file}}
            From {{file}}, print {{what}}. Shell.
        """,
        cases="""
            what                         file        command
            the first 20 lines           report.txt  head -n 20 report.txt
            the last 50 lines            server.log  tail -n 50 server.log
            lines 10 to 15               main.c      sed -n '10,15p' main.c
            everything after the header  data.csv    tail -n +2 data.csv
            the non-blank lines          notes.md    grep -v '^[[:space:]]*$' notes.md
            the longest line             poem.txt    awk 'length > n {n = length; line = $0} END {print line}' poem.txt
        """,
        code="{{command}}",
    ),
    Task(
        name="replace in file",
        kind="shell",
        asks="""
            {{do}} in {{file}}, in place
            edit {{file}} in place to {{do}}
        """,
        cases="""
            do                             file         script
            replace "http:" with "https:"  links.txt    s/http:/https:/g
            delete all comment lines       config.ini   /^#/d
            remove trailing spaces         README.md    s/[[:space:]]*$//
            change port 8080 to 9090       server.conf  s/8080/9090/g
            delete the first line          table.csv    1d
            replace tabs with commas       table.tsv    s/\\t/,/g
        """,
        code="sed -i '{{script}}' {{file}}",
    ),
    Task(
        name="disk use",
        kind="shell",
        asks="""
            show the {{n}} largest {{what}} in {{where}}
            list the {{n}} {{what}} that use most space in {{where}}
        """,
        cases="""
            n   what               where           command
            10  files and folders  this directory  du -sh * | sort -rh | head -n 10
            5   subfolders         /var            du -s /var/*/ | sort -rn | head -n 5
            20  files              the src folder  find src -type f -exec du -k {} + | sort -rn | head -n 20
        """,
        code="{{command}}",
    ),
    Task(
        name="archives",
        kind="shell",
        asks="""
            {{do}}
            use tar to {{do}}
        """,
        cases="""
            do                                        command
            pack the folder src into src.tar.gz       tar -czf src.tar.gz src
            unpack backup.tar.gz into the folder old  tar -xzf backup.tar.gz -C old
            list the contents of data.tar.gz          tar -tzf data.tar.gz
            pack docs without its .git folder         tar --exclude=.git -czf docs.tar.gz docs
            unpack only README.md from app.tar.gz     tar -xzf app.tar.gz README.md
        """,
        code="{{command}}",
    ),
    Task(
        name="compare files",
        kind="shell",
        asks="""
            list the lines that are {{what}}
            print all lines {{what}}
        """,
        cases="""
            what                       flags
            in both a.txt and b.txt    -12
            in a.txt but not in b.txt  -23
        """,
        code="comm {{flags}} <(sort a.txt) <(sort b.txt)",
        held_out=True,
    ),
    Task(
        name="rename loop",
        kind="shell",
        asks="""
            rename all {{old}} files here to {{new}}
            change the extension of every {{old}} file to {{new}}
        """,
        cases="""
            old    new
            .jpeg  .jpg
        """,
        code="""for file in *{{old}}; do mv "$file" "${file%{{old}}}{{new}}"; done""",
        held_out=True,
    ),
)
