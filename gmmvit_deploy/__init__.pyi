from gmmvit_deploy.bulk.run import classify_source as classify_source
from gmmvit_deploy.bundle.artifacts import open_bundle as open_bundle
from gmmvit_deploy.checkpoints.loading import load_checkpoint as load_checkpoint
from gmmvit_deploy.exporting.bundle_from_checkpoint import bundle_from_checkpoint as bundle_from_checkpoint
from gmmvit_deploy.exporting.from_module import export as export
from gmmvit_deploy.exporting.options import ExportOptions as ExportOptions
from gmmvit_deploy.exporting.variants import variant_from_bundle as variant_from_bundle
from gmmvit_deploy.models.folding.fold import fold as fold
from gmmvit_deploy.models.sources.hints import LoadHints as LoadHints
from gmmvit_deploy.optimize.run import OptimizeOptions as OptimizeOptions
from gmmvit_deploy.optimize.run import optimize_bundle as optimize_bundle
from gmmvit_deploy.parity.check import check_parity as check_parity
from gmmvit_deploy.parity.options import ParityOptions as ParityOptions
from gmmvit_deploy.runtimes.runners.classify import BundleClassifier as BundleClassifier
from gmmvit_deploy.runtimes.runners.classify import classify_files as classify_files
from gmmvit_deploy.runtimes.runners.open import open_runner as open_runner

__version__: str
