//! Compiles `src/mpi_shim.c` with the same MPI that the `mpi` crate found.

fn main() {
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
