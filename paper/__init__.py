"""The paper's tables, figures and appendices, made with anybit; no part of the package. README.md says how."""
