"""``download``: checkpoints from the hub, or GPT-NeoX-20B from a mirror."""

from streamload.downloading.downloads import DownloadReport, download, neox_files, neox_folder

__all__ = ["DownloadReport", "download", "neox_files", "neox_folder"]
