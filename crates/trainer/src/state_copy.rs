//! A copy of a rank's slice of the state, from which a checkpoint is written.

use baton_checkpoint::{Snapshot, slice_of};
use baton_collectives::{BufferMut, DeviceSliceMut, Error};
use baton_gpu::{Device, DeviceSnapshot};
use baton_job::Rank;

use crate::Learner;

/// A copy of the state; its memory is reused by the next copy. A state on a GPU is first copied within GPU memory;
/// [`snapshot`](Self::snapshot) brings it to the host while training continues.
#[derive(Debug, Default)]
pub struct StateCopy {
    snapshot: Snapshot,
    /// Copies in GPU memory, by region.
    on_device: Vec<DeviceCopy>,
}

#[derive(Debug)]
struct DeviceCopy {
    region: &'static str,
    len: usize,
    snapshot: DeviceSnapshot,
}

impl StateCopy {
    /// Copies the slice of `rank`, without frozen regions, which are saved separately. Training is paused during this
    /// call.
    ///
    /// # Errors
    /// The device failed.
    pub fn take<L: Learner>(
        &mut self,
        learner: &mut L,
        rank: Rank,
        world_size: u32,
    ) -> Result<(), Error> {
        for region in learner.regions().into_iter().filter(|region| region.frozen.is_none()) {
            let range = slice_of(region.buffer.len(), rank, world_size);
            let len = range.len();
            match region.buffer.narrow(range) {
                BufferMut::Host(values) => {
                    self.snapshot.slice(region.name, len).copy_from_slice(values);
                }
                BufferMut::Device(values) => {
                    if let Err(error) = self.capture(region.name, &values) {
                        // A slow step is better than a missing checkpoint.
                        tracing::warn!(
                            region = region.name, %error,
                            "cannot copy the state on the GPU: training waits while it is copied to the host"
                        );
                        let slice = self.snapshot.slice(region.name, len);
                        BufferMut::Device(values).copy_to_host(slice)?;
                    }
                }
            }
        }
        Ok(())
    }

    /// The copy in host memory; waits until it is complete.
    ///
    /// # Errors
    /// The device failed.
    pub fn snapshot(&mut self) -> Result<&Snapshot, Error> {
        for DeviceCopy { region, len, snapshot } in &mut self.on_device {
            snapshot.read(bytemuck::cast_slice_mut(self.snapshot.slice(region, *len)))?;
        }
        Ok(&self.snapshot)
    }

    fn capture(&mut self, region: &'static str, values: &DeviceSliceMut<'_>) -> Result<(), Error> {
        let known = self.on_device.iter().position(|copy| copy.region == region);
        // Removed from the list, so that after a failure there is nothing to read.
        let mut snapshot = match known {
            Some(index) => self.on_device.swap_remove(index).snapshot,
            None => DeviceSnapshot::new(Device::open(values.device())?)?,
        };
        values.capture(&mut snapshot)?;
        self.on_device.push(DeviceCopy { region, len: values.len(), snapshot });
        Ok(())
    }
}
