//! NCCL on simulated GPUs: everything happens late and in any order that CUDA and NCCL allow. A failure prints its
//! seed; `BATON_FAKE_GPU_SEED` repeats it, as far as the timing of the rank threads allows.
#![allow(unsafe_code)]

use std::time::Duration;

use baton_collectives::nccl::{NcclCollective, NcclOptions, SummationOrder};
use baton_collectives::{BufferMut, Collective, DeviceSliceMut, Error, Machines, Part, TreeNode};
use baton_fake_gpu::{for_seeds, run};
use baton_gpu::{Device, DeviceMemory, Stream, StreamEvent, copy_in, copy_out};
use baton_job::Rank;

use crate::conformance::{Random, partial_sums, same, tree_sum};
use crate::{LONG, local, on_every_rank};

/// One rank's GPU, with libtorch's stream.
struct Gpu {
    device: Device,
    torch: Stream,
    /// Sources of queued copies, kept alive.
    kept: Vec<Vec<u8>>,
}

/// Values in GPU memory.
struct Values {
    memory: DeviceMemory,
    len: usize,
    device: Device,
}

impl Gpu {
    fn new(rank: Rank) -> Self {
        let device = Device::open(rank.0 as i32).unwrap();
        Self { device, torch: Stream::of_torch(device), kept: Vec::new() }
    }

    /// New memory; `values` are queued to be written to it.
    fn values(&mut self, values: &[f32]) -> Values {
        let len = values.len();
        let memory = DeviceMemory::new(self.device, 4 * len).unwrap();
        let target = Values { memory, len, device: self.device };
        self.write(&target, values);
        target
    }

    /// Queues the writing of `values`.
    fn write(&mut self, to: &Values, values: &[f32]) {
        self.kept.push(values.iter().flat_map(|value| value.to_ne_bytes()).collect());
        let bytes = &self.kept[self.kept.len() - 1];
        // SAFETY: kept sources live until all copies are done.
        unsafe { copy_in(&self.torch, to.memory.address(), bytes) }.unwrap();
    }

    /// The values after all queued work; then overwrites them with NaN at once.
    fn take(&mut self, from: &Values) -> Vec<f32> {
        let mut bytes = vec![0; 4 * from.len];
        // SAFETY: the copy is waited for before `bytes` is read.
        unsafe { copy_out(&self.torch, &mut bytes, from.memory.address()) }.unwrap();
        self.write(from, &vec![f32::NAN; from.len]);
        self.wait();
        bytes.as_chunks::<4>().0.iter().map(|value| f32::from_ne_bytes(*value)).collect()
    }

    fn wait(&self) {
        let finished = StreamEvent::new(self.device).unwrap();
        self.torch.mark(&finished).unwrap();
        finished.wait().unwrap();
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        self.wait();
    }
}

impl Values {
    fn buffer(&mut self) -> BufferMut<'_> {
        let (address, ordinal) = (self.memory.address(), self.device.ordinal());
        // SAFETY: this many values are valid there, written by libtorch's stream before any other work.
        BufferMut::Device(unsafe { DeviceSliceMut::from_raw(address, self.len, ordinal) })
    }
}

/// So many ranks on so many machines.
fn on_machines(world_size: u32, machines: u32) -> Machines {
    let address = |rank| format!("10.0.0.{}:29500", rank * machines / world_size);
    Machines::of_addresses(&(0..world_size).map(address).collect::<Vec<_>>())
}

/// Connects to the other ranks of `bootstrap`, on the GPU of its rank.
fn connect(
    bootstrap: Box<dyn Collective>,
    machines: Machines,
    order: SummationOrder,
    timeout: Duration,
) -> NcclCollective {
    let options = NcclOptions {
        order,
        connect_timeout: LONG,
        operation_timeout: timeout,
        abort_timeout: LONG,
    };
    let device = bootstrap.rank().0 as i32;
    NcclCollective::connect(bootstrap, machines, device, options).unwrap()
}

/// Runs `body` on one thread for each rank of a new group.
fn with_group<R: Send>(
    world_size: u32,
    how: (SummationOrder, Duration),
    body: impl Fn(&mut Gpu, NcclCollective) -> R + Sync,
) -> Vec<R> {
    with_group_on(Machines::one(world_size), world_size, how, body)
}

/// As [`with_group`], on these machines.
fn with_group_on<R: Send>(
    machines: Machines,
    world_size: u32,
    (order, timeout): (SummationOrder, Duration),
    body: impl Fn(&mut Gpu, NcclCollective) -> R + Sync,
) -> Vec<R> {
    on_every_rank(local::group(world_size, LONG), |rank, bootstrap| {
        let mut gpu = Gpu::new(rank);
        let group = connect(Box::new(bootstrap), machines.clone(), order, timeout);
        body(&mut gpu, group)
    })
}

/// The sum of `leaves`, computed by all ranks together.
fn all_reduce(gpu: &mut Gpu, group: &mut NcclCollective, leaves: &[Vec<f32>]) -> Vec<f32> {
    let mut sums: Vec<(TreeNode, Values)> = partial_sums(group, leaves)
        .into_iter()
        .map(|(node, sum)| (node, gpu.values(&sum)))
        .collect();
    let mut parts: Vec<Part<'_>> =
        sums.iter_mut().map(|(node, sum)| Part { node: *node, buffer: sum.buffer() }).collect();
    group.all_reduce(leaves.len() as u32, &mut parts).unwrap();
    gpu.take(&sums[0].1)
}

#[test]
fn strict_sums_are_the_fixed_trees_bit_for_bit() {
    let mut cases = Vec::new();
    for world_size in [1, 2, 3, 4, 8] {
        for virtual_ranks in [8, 16] {
            for len in [0, 1, 5, 1000, 70_001] {
                for machines in 1..=world_size.min(3) {
                    cases.push((world_size, machines, virtual_ranks, len));
                }
            }
        }
    }
    let seeds = 3 * cases.len() as u64;
    for_seeds("nccl::strict_sums_are_the_fixed_trees_bit_for_bit", seeds, |_, seed| {
        let (world_size, machines, virtual_ranks, len) = cases[seed as usize % cases.len()];
        let mut random = Random(seed);
        let leaves: Vec<_> = (0..virtual_ranks).map(|_| random.values(len)).collect();
        let expected = tree_sum(&leaves);
        let (how, machines) =
            ((SummationOrder::FixedTree, LONG), on_machines(world_size, machines));
        let totals = with_group_on(machines.clone(), world_size, how, |gpu, mut group| {
            all_reduce(gpu, &mut group, &leaves)
        });
        for total in totals {
            assert!(same(&total, &expected), "{machines:?}, {virtual_ranks}, {len}");
        }
    });
}

#[test]
fn operations_follow_each_other_on_the_same_group() {
    for_seeds("nccl::operations_follow_each_other_on_the_same_group", 100, |_, seed| {
        let mut random = Random(seed);
        let world_size = [1, 2, 3, 5, 8][seed as usize % 5];
        let rounds: Vec<_> = (0..4)
            .map(|_| {
                let len = random.next() as usize % 300;
                let root = Rank(random.next() as u32 % world_size);
                let leaves: Vec<_> = (0..8).map(|_| random.values(len)).collect();
                (tree_sum(&leaves), leaves, root, random.values(2 * len))
            })
            .collect();
        with_group(world_size, (SummationOrder::FixedTree, LONG), |gpu, mut group| {
            for (sum, leaves, root, sent) in &rounds {
                assert!(same(&all_reduce(gpu, &mut group, leaves), sum));
                let before = if group.rank() == *root { sent } else { &vec![0.5; sent.len()] };
                let mut received = gpu.values(before);
                group.broadcast(*root, received.buffer()).unwrap();
                assert!(same(&gpu.take(&received), sent));
                assert_eq!(group.all_gather_bytes(b"x").unwrap().len(), world_size as usize);
            }
        });
    });
}

#[test]
fn sums_in_nccls_own_order_are_sums() {
    for_seeds("nccl::sums_in_nccls_own_order_are_sums", 100, |_, seed| {
        let world_size = 1 + seed as u32 % 8;
        let total = (1..=world_size).sum::<u32>() as f32;
        with_group(world_size, (SummationOrder::Library, LONG), |gpu, mut group| {
            for len in [0, 1, 777] {
                let mine = group.rank().0 as f32 + 1.0;
                let mut values = gpu.values(&vec![mine; len]);
                let part = Part { node: TreeNode::leaf(0), buffer: values.buffer() };
                group.all_reduce(1, &mut [part]).unwrap();
                assert_eq!(gpu.take(&values), vec![total; len]);
            }
        });
    });
}

/// An all-reduce in which only some ranks take part, on values that are overwritten as soon as it fails.
fn interrupted(gpu: &mut Gpu, group: &mut NcclCollective) -> Option<Error> {
    let leaves = vec![vec![1.0; 500]; 8];
    let mut sums: Vec<_> = partial_sums(group, &leaves)
        .into_iter()
        .map(|(node, sum)| (node, gpu.values(&sum)))
        .collect();
    let mut parts: Vec<Part<'_>> =
        sums.iter_mut().map(|(node, sum)| Part { node: *node, buffer: sum.buffer() }).collect();
    let failed = group.all_reduce(8, &mut parts).err();
    // Work that the operation has left in its queues must not disturb later work.
    for (_, sum) in &sums {
        gpu.write(sum, &[2.0; 500]);
        assert_eq!(gpu.take(sum), [2.0; 500]);
    }
    failed
}

#[test]
fn a_missing_peer_times_out_and_a_new_generation_works() {
    let name = "nccl::a_missing_peer_times_out_and_a_new_generation_works";
    for_seeds(name, 30, |_, seed| {
        let world_size = 2 + seed as u32 % 3;
        let short = Duration::from_millis(20);
        let groups =
            with_group(world_size, (SummationOrder::FixedTree, short), |gpu, mut group| {
                // The missing rank stays alive: only the timeout can detect it.
                if group.rank() == Rank(0) {
                    return group;
                }
                let failed = interrupted(gpu, &mut group).unwrap();
                assert_eq!(failed.to_string(), "all_reduce: timed out after 20ms");
                let later = interrupted(gpu, &mut group).unwrap();
                assert!(matches!(later, Error::Broken { .. }), "{later}");
                group
            });
        let leaves = vec![vec![0.1; 700]; 8];
        with_group(world_size, (SummationOrder::FixedTree, LONG), |gpu, mut group| {
            assert!(same(&all_reduce(gpu, &mut group, &leaves), &tree_sum(&leaves)));
        });
        drop(groups);
    });
}

#[test]
fn an_abort_at_any_time_ends_the_operation_and_leaves_nothing_behind() {
    let name = "nccl::an_abort_at_any_time_ends_the_operation_and_leaves_nothing_behind";
    for_seeds(name, 60, |_, seed| {
        on_every_rank(local::group(3, LONG), |rank, bootstrap| {
            // The other ranks time out in the end, because they are not informed of the abort.
            let timeout = if rank == Rank(1) { LONG } else { Duration::from_millis(200) };
            let gpu = &mut Gpu::new(rank);
            let machines = on_machines(3, 1 + seed as u32 % 3);
            let order = SummationOrder::FixedTree;
            let mut group = connect(Box::new(bootstrap), machines, order, timeout);
            if rank != Rank(1) {
                // The operation was done before the abort, or times out.
                let failed = interrupted(gpu, &mut group);
                assert!(matches!(failed, None | Some(Error::TimedOut { .. })), "{failed:?}");
                return;
            }
            let abort = group.abort_handle();
            let failed = std::thread::scope(|scope| {
                scope.spawn(|| {
                    (0..seed * 5).for_each(|_| std::thread::yield_now());
                    abort.abort();
                });
                interrupted(gpu, &mut group)
            });
            assert!(matches!(failed, None | Some(Error::Aborted { .. })), "{failed:?}");
            let later = interrupted(gpu, &mut group).unwrap();
            assert!(matches!(later, Error::Aborted { operation: "all_reduce" }), "{later}");
        });
    });
}

#[test]
fn machines_of_another_group_are_refused() {
    run("nccl::machines_of_another_group_are_refused", |_| {
        on_every_rank(local::group(2, LONG), |rank, bootstrap| {
            let options = NcclOptions {
                order: SummationOrder::FixedTree,
                connect_timeout: LONG,
                operation_timeout: LONG,
                abort_timeout: LONG,
            };
            let (bootstrap, device) = (Box::new(bootstrap), rank.0 as i32);
            let refused = NcclCollective::connect(bootstrap, Machines::one(1), device, options);
            let refused = refused.unwrap_err().to_string();
            assert_eq!(refused, "connect: the machines have 1 ranks, the group has 2");
        });
    });
}

#[test]
fn an_abort_ends_the_wait_for_a_missing_peer() {
    let name = "nccl::an_abort_ends_the_wait_for_a_missing_peer";
    for_seeds(name, 30, |_, _| {
        let groups = with_group(2, (SummationOrder::Library, LONG), |gpu, mut group| {
            if group.rank() == Rank(1) {
                return group;
            }
            let abort = group.abort_handle();
            let mut values = gpu.values(&[1.0; 100]);
            let failed = std::thread::scope(|scope| {
                scope.spawn(move || abort.abort());
                group.broadcast(Rank(1), values.buffer()).unwrap_err()
            });
            assert!(matches!(failed, Error::Aborted { operation: "broadcast" }), "{failed}");
            group
        });
        drop(groups);
    });
}

#[test]
fn an_abort_that_hangs_is_reported_and_blocks_no_caller() {
    run("nccl::an_abort_that_hangs_is_reported_and_blocks_no_caller", |fake| {
        fake.hang_aborts();
        on_every_rank(local::group(2, LONG), |rank, bootstrap| {
            let short = Duration::from_millis(20);
            let options = NcclOptions {
                order: SummationOrder::FixedTree,
                connect_timeout: LONG,
                operation_timeout: short,
                abort_timeout: short,
            };
            let ordinal = rank.0 as i32;
            let machines = Machines::one(2);
            let mut group =
                NcclCollective::connect(Box::new(bootstrap), machines, ordinal, options).unwrap();
            if rank == Rank(1) {
                return drop(group);
            }
            let mut gpu = Gpu::new(rank);
            let mut sum = gpu.values(&[1.0; 8]);
            let part = Part { node: TreeNode { start: 0, leaves: 4 }, buffer: sum.buffer() };
            let failed = group.all_reduce(8, &mut [part]).unwrap_err();
            assert!(matches!(failed, Error::Stuck { .. }), "{failed}");
            // Its device never finishes: freeing would hang.
            std::mem::forget((gpu, sum));
        });
    });
}

#[test]
fn no_host_blocks_in_the_driver() {
    for_seeds("nccl::no_host_blocks_in_the_driver", 50, |gpus, _| {
        let (leaves, waits) = (vec![vec![1.0; 999]; 8], gpus.host_waits());
        let total = with_group(3, (SummationOrder::FixedTree, LONG), |gpu, mut group| {
            let mut sums: Vec<_> = partial_sums(&group, &leaves)
                .into_iter()
                .map(|(node, sum)| (node, gpu.values(&sum)))
                .collect();
            let mut parts: Vec<Part<'_>> = sums
                .iter_mut()
                .map(|(node, sum)| Part { node: *node, buffer: sum.buffer() })
                .collect();
            group.all_reduce(8, &mut parts).unwrap();
            assert_eq!(gpus.host_waits(), waits);
            // No rank may free memory before all have checked.
            group.all_gather_bytes(&[]).unwrap();
            gpu.take(&sums[0].1)
        });
        assert!(total.iter().all(|total| total == &[8.0; 999]));
    });
}
