//! A rank's slice of the state, as it was when training stood still for it.

use baton_checkpoint::{Snapshot, slice_of};
use baton_collectives::{BufferMut, DeviceSliceMut, Error};
use baton_gpu::{Device, Freezer};
use baton_job::Rank;

use crate::Learner;

/// Its memory is used again by the next copy. Where the state is on a GPU, that copies it within its own
/// memory, and [`snapshot`](Self::snapshot) brings it to the host while training goes on.
#[derive(Debug, Default)]
pub struct StateCopy {
    snapshot: Snapshot,
    /// What is still on a device, by region.
    frozen: Vec<Frozen>,
}

#[derive(Debug)]
struct Frozen {
    region: &'static str,
    len: usize,
    freezer: Freezer,
}

impl StateCopy {
    /// Copies the slice of `rank`: what training stands still for at a checkpoint.
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
                    if let Err(error) = self.freeze(region.name, &values) {
                        // Better a step that takes longer than a checkpoint that is not there.
                        tracing::warn!(
                            region = region.name, %error,
                            "no copy on the GPU: training waits while this crosses to the host"
                        );
                        let slice = self.snapshot.slice(region.name, len);
                        BufferMut::Device(values).copy_to_host(slice)?;
                    }
                }
            }
        }
        Ok(())
    }

    /// The copy in host memory; waits for what is still on a device.
    ///
    /// # Errors
    /// The device failed.
    pub fn snapshot(&mut self) -> Result<&Snapshot, Error> {
        for Frozen { region, len, freezer } in &mut self.frozen {
            freezer.thaw(bytemuck::cast_slice_mut(self.snapshot.slice(region, *len)))?;
        }
        Ok(&self.snapshot)
    }

    fn freeze(&mut self, region: &'static str, values: &DeviceSliceMut<'_>) -> Result<(), Error> {
        let known = self.frozen.iter().position(|frozen| frozen.region == region);
        // Taken out: if it fails there is nothing to thaw.
        let mut freezer = match known {
            Some(index) => self.frozen.swap_remove(index).freezer,
            None => Freezer::new(Device::open(values.device())?)?,
        };
        values.freeze(&mut freezer)?;
        self.frozen.push(Frozen { region, len: values.len(), freezer });
        Ok(())
    }
}
