//! The 24 bytes at the start of a shard, from which its number of samples is known.

use crate::FileFault;

/// Length of the header.
pub(super) const BYTES: u64 = 24;

/// The number of samples that a header tells.
///
/// # Errors
/// The header is cut off, of another version, or of a file whose writer never finished.
pub(super) fn samples(header: &[u8]) -> Result<u64, FileFault> {
    let file_bytes = header.len() as u64;
    let cut_off = || match file_bytes {
        0 => FileFault::Empty,
        _ => FileFault::CutOff { section: "header", start: 0, end: BYTES, file_bytes },
    };
    let (version, rest) = header.split_first_chunk().ok_or_else(cut_off)?;
    let (_num_fields, rest) = rest.split_first_chunk::<2>().ok_or_else(cut_off)?;
    let (page_size, rest) = rest.split_first_chunk().ok_or_else(cut_off)?;
    let (num_samples, rest) = rest.split_first_chunk().ok_or_else(cut_off)?;
    let (alloc_table, _) = rest.split_first_chunk().ok_or_else(cut_off)?;

    let version = u16::from_le_bytes(*version);
    if version != 2 {
        return Err(FileFault::Version(version));
    }
    let page_size = u32::from_le_bytes(*page_size);
    if !page_size.is_power_of_two() {
        return Err(FileFault::PageSize(page_size));
    }
    if u64::from_le_bytes(*alloc_table) == 0 {
        return Err(FileFault::Unfinished);
    }
    Ok(u64::from_le_bytes(*num_samples))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(version: u16, page_size: u32, num_samples: u64, alloc_table: u64) -> Vec<u8> {
        let mut bytes = version.to_le_bytes().to_vec();
        bytes.extend(2_u16.to_le_bytes());
        bytes.extend(page_size.to_le_bytes());
        bytes.extend(num_samples.to_le_bytes());
        bytes.extend(alloc_table.to_le_bytes());
        bytes
    }

    #[test]
    fn a_header_tells_its_samples() {
        assert_eq!(samples(&header(2, 8 << 20, 50_000, 99)), Ok(50_000));
    }

    #[test]
    fn what_is_no_finished_beton_file_is_refused() {
        assert_eq!(samples(&[]), Err(FileFault::Empty));
        assert_eq!(samples(&header(3, 8, 1, 9)), Err(FileFault::Version(3)));
        assert_eq!(samples(&header(2, 7, 1, 9)), Err(FileFault::PageSize(7)));
        assert_eq!(samples(&header(2, 8, 1, 0)), Err(FileFault::Unfinished));
        assert!(matches!(samples(&header(2, 8, 1, 9)[..23]), Err(FileFault::CutOff { .. })));
    }
}
