//! conversions
/// placeholder
#[derive(Debug)]
pub struct Malformed;
