//! The statuses that Python has handed out, which programs name by their addresses.
//!
//! A program is text, and may come from another process: a receive would write to whatever address it gives for a status. So
//! only addresses in this table are accepted.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard};

use crate::call::Status;
use crate::error::Cause;
use crate::sync::lock;

/// How often each address was handed out.
static KNOWN: Mutex<BTreeMap<usize, usize>> = Mutex::new(BTreeMap::new());

fn known() -> MutexGuard<'static, BTreeMap<usize, usize>> {
    lock(&KNOWN)
}

/// Programs may write a status to this address.
///
/// # Safety
/// The address points to an `MPI_Status`, which lives until [`remove`] was called equally often,
/// and as long as a program that names it.
pub unsafe fn add(address: usize) {
    *known().entry(address).or_default() += 1;
}

/// Undoes one [`add`]. After as many calls, nothing is written to the address any more.
#[cfg_attr(feature = "python", pyo3::pyfunction(name = "remove_status"))]
pub fn remove(address: usize) {
    let mut known = known();
    if let Some(count) = known.get_mut(&address) {
        *count -= 1;
        if *count == 0 {
            known.remove(&address);
        }
    }
}

/// The address that a program gives, 0 being none.
pub fn checked(address: usize) -> Result<Status, Cause> {
    if address == 0 || known().contains_key(&address) {
        // SAFETY: promised to `add`.
        return Ok(unsafe { Status::at(address) });
    }
    Err(Cause::Attribute {
        name: "status",
        expected: "a live status of this process",
        actual: format!("address {address:#x}"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_was_handed_out_is_written_to() {
        let address = 0x7f00_dead_bee0;
        assert!(!checked(0).unwrap().is_some());
        let refused = || checked(address).unwrap_err().to_string();
        assert!(refused().contains("0x7f00deadbee0"), "{}", refused());
        // SAFETY: nothing is written there.
        unsafe {
            add(address);
            add(address);
        }
        remove(address);
        assert!(checked(address).unwrap().is_some());
        remove(address);
        assert!(refused().contains("a live status of this process"));
        remove(address);
    }
}
