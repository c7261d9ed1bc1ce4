from plateaux.studies.result_rows import ResultRow as ResultRow
from plateaux.studies.result_rows import results_from_study as results_from_study
from plateaux.studies.runner import StudyRunner as StudyRunner
from plateaux.studies.study import Study as Study
