//! One number for a whole training state.

/// BLAKE3 over named regions in order. Equal digests mean equal bits.
#[derive(Clone, Debug, Default)]
pub struct StateDigest(blake3::Hasher);

impl StateDigest {
    /// The digest of nothing.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a region of f32 values.
    pub fn region(&mut self, name: &str, values: &[f32]) {
        self.bytes(name, bytemuck::cast_slice(values));
    }

    /// Adds anything else.
    pub fn bytes(&mut self, name: &str, bytes: &[u8]) {
        // Lengths keep apart what names and values alone would run together.
        self.0.update(&(name.len() as u64).to_le_bytes()).update(name.as_bytes());
        self.0.update(&(bytes.len() as u64).to_le_bytes()).update(bytes);
    }

    /// The digest in hex.
    #[must_use]
    pub fn finish(self) -> String {
        self.0.finalize().to_hex().to_string()
    }
}
