"""The dashboard: a page over all runs in a folder, served to a browser. It writes nothing.

Server: `run_folder` finds the runs, `run_row` is a line of the list, `open_run` holds the metrics
of those that are looked at, `live_stream` tells what is new, `dashboard_app` has the routes.
Browser: the files in `static/`, without a build step; they draw what the server has thinned.
"""
