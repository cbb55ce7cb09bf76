"""Exercise 4. There are 359 images, and four ranks count 360. Which image is counted twice, and why?"""

import torch
import torch.distributed as dist
from shared import TRAINING_SAMPLES, digits, network
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
images, labels = (values[TRAINING_SAMPLES:] for values in digits())
test_set = TensorDataset(images, labels)
sampler = DistributedSampler(test_set, shuffle=False)
net, counts = network(), torch.zeros(2, dtype=torch.int64)  # images, and those that are classified right
with torch.no_grad():
    for some_images, some_labels in DataLoader(test_set, batch_size=64, sampler=sampler):
        right = net(some_images).argmax(dim=1) == some_labels
        counts += torch.tensor([len(some_labels), right.sum()])
dist.all_reduce(counts)
if dist.get_rank() == 0:
    print("right", counts[1].item(), "of", counts[0].item())
dist.destroy_process_group()
