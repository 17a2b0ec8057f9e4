import torch, torch.distributed as dist, torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
import trimtab

dist.init_process_group("gloo")                                          # "nccl" on GPUs
dataset = torch.utils.data.TensorDataset(torch.randn(4096, 256), torch.randint(0, 10, (4096,)))
ddp = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10)))
trimtab.compress(ddp)                                                    # fewer bits, if the link is the bottleneck
optimizer = torch.optim.AdamW(ddp.parameters())
loader = trimtab.loader(dataset, batch_size=256)                         # each rank gets the samples it can handle
for inputs, targets in loader:
    loader.weigh(F.cross_entropy(ddp(inputs), targets)).backward()       # every sample counts the same
    optimizer.step()
    optimizer.zero_grad()
print(trimtab.explain(ddp))
dist.destroy_process_group()
