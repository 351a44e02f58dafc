"""TransferQueue's key-value interface on memoire's servers: `pip install 'memoire-rl[tq]'`.

    import memoire.tq as tq                # instead of: import transfer_queue as tq

    tq.init({"memoire": {"servers": ["tcp://memoire:5560"]}})
    tq.kv_batch_put(keys, "train", TensorDict({"responses": responses}, batch_size=len(keys)), tags)
    data = tq.kv_batch_get(keys, "train", select_fields=["responses"])

Names, results and errors are those of TransferQueue 0.1.11; docs/transferqueue.md lists the differences. Memoire's
servers store the rows, spread over them by key. Memoire uses no Ray actors, and never pickles values.
"""

from memoire.errors import NotInstalled

with NotInstalled.explained("pip install 'memoire-rl[tq]'"):
    from .client import KeyedClient as KeyedClient
    from .interface import async_kv_batch_get as async_kv_batch_get
    from .interface import async_kv_batch_get_by_meta as async_kv_batch_get_by_meta
    from .interface import async_kv_batch_put as async_kv_batch_put
    from .interface import async_kv_clear as async_kv_clear
    from .interface import async_kv_list as async_kv_list
    from .interface import async_kv_put as async_kv_put
    from .interface import close as close
    from .interface import get_client as get_client
    from .interface import get_metrics_endpoint as get_metrics_endpoint
    from .interface import init as init
    from .interface import kv_batch_get as kv_batch_get
    from .interface import kv_batch_get_by_meta as kv_batch_get_by_meta
    from .interface import kv_batch_put as kv_batch_put
    from .interface import kv_clear as kv_clear
    from .interface import kv_list as kv_list
    from .interface import kv_put as kv_put
    from .interface import load_checkpoint as load_checkpoint
    from .interface import save_checkpoint as save_checkpoint
    from .metadata import BatchMeta as BatchMeta
    from .metadata import KVBatchMeta as KVBatchMeta

__version__ = "0.1.11"
"""Version of TransferQueue with these calls: trainers check it before they save checkpoints or repeat prompts."""
