//! Compiles `src/mpi_shim.c` with the same MPI that the `mpi` crate found.

use std::fs;
use std::hash::{DefaultHasher, Hasher};
use std::path::Path;

/// A number of the sources: ranks tell by it that they run different builds.
fn add(folder: &Path, hasher: &mut DefaultHasher) {
    let mut paths: Vec<_> =
        fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    paths.sort();
    for path in paths {
        if path.is_dir() {
            add(&path, hasher);
        } else {
            hasher.write(&fs::read(&path).unwrap_or_default());
        }
    }
}

fn main() {
    println!("cargo:rerun-if-changed=src");
    let mut hasher = DefaultHasher::new();
    add(Path::new("src"), &mut hasher);
    println!("cargo:rustc-env=MPI4JAX_SOURCES={:08x}", hasher.finish() as u32);
    println!("cargo:rerun-if-changed=src/mpi_shim.c");
    println!("cargo:rerun-if-env-changed=MPICC");
    let mpi = build_probe_mpi::probe().unwrap_or_else(|errors| {
        for error in errors {
            println!("cargo:warning={error}");
        }
        panic!("no MPI library found: put `mpicc` on PATH or name it in MPICC")
    });
    let mut shim = cc::Build::new();
    shim.file("src/mpi_shim.c").includes(&mpi.include_paths);
    if let Some(mpicc) = &mpi.mpicc {
        shim.compiler(mpicc);
    }
    shim.compile("mpi4jax_mpi_shim");
}
