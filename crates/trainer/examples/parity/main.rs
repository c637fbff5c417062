//! Baton's side of `make parity`: computes, from what `scripts/parity/parity.py` wrote, everything
//! that PyTorch computes too, for comparison there. Each part has a module of the same name in Python,
//! which says what is compared and how closely.

mod case;
mod curves;
mod export;
mod mixing;
mod models;
mod schedules;
mod updates;

use std::{env, path::Path};

use baton_trainer::torch::device;

use self::case::{Case, Named, Result};

/// Computes what one part of parity.py compares.
type Part = fn(&Case) -> Result<Named>;

/// The parts by the names of their folders.
const PARTS: [(&str, Part); 6] = [
    ("models", models::results),
    ("updates", updates::results),
    ("curves", curves::results),
    ("schedules", schedules::results),
    ("mixing", mixing::results),
    ("export", export::results),
];

fn main() -> Result<()> {
    let work = env::args().nth(1).ok_or("usage: parity FOLDER")?;
    // As many as in Python, for the same rounding.
    device::set_threads(1);
    for (part, results) in PARTS {
        let folder = Path::new(&work).join(part);
        if !folder.is_dir() {
            continue;
        }
        eprintln!("parity: {part}, Baton");
        for case in Case::all(&folder)? {
            case.write(&results(&case)?)?;
        }
    }
    Ok(())
}
