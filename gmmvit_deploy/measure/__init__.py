"""How fast is a program?  Every command that times one asks this package, which knows no runtime.

Only the clock of a GPU, and a profile of a runtime, are read where they are: `bench._products`,
`runtimes.programs.openvino_times`.

turns        run programs in turn, and return the seconds of each in each round
statistics   the ratio of two programs with its interval, percentiles, the spread of rounds
load         send queries as MLPerf's LoadGen does, and return the latency of each
"""
