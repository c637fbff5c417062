//! A digest of the complete training state.
//!
//! Runs are compared by it across versions: the order of regions and the hashed bytes may not change.

/// BLAKE3 over named regions in order. Equal digests mean equal bits.
#[derive(Clone, Debug, Default)]
pub struct StateDigest(blake3::Hasher);

impl StateDigest {
    /// Adds a region of f32 values.
    pub fn region(&mut self, name: &str, values: &[f32]) {
        self.bytes(name, bytemuck::cast_slice(values));
    }

    /// Adds a named sequence of bytes.
    pub fn bytes(&mut self, name: &str, bytes: &[u8]) {
        // Hash the lengths as well: without them, different splits into name and bytes would give equal digests.
        self.0.update(&(name.len() as u64).to_le_bytes()).update(name.as_bytes());
        self.0.update(&(bytes.len() as u64).to_le_bytes()).update(bytes);
    }

    /// The digest in hex.
    #[must_use]
    pub fn finish(self) -> String {
        self.0.finalize().to_hex().to_string()
    }
}
